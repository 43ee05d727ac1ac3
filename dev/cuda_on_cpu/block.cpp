/* One block: threads that take turns on one OS thread, and where they meet.
 *
 * A thread runs until it must wait at a barrier or warp collective, or ends; then the next one that can run goes on,
 * in the order of CUDA_ON_CPU_ORDER: lanes of the same warp first, so that a warp gets as far as it can before the
 * next one. A thread that has not begun needs no stack of its own when another has just ended: it takes over that
 * one's, so kernels without barriers never switch stacks.
 *
 * A warp collective (a shuffle, a vote, an mma) is a meeting of the lanes of a mask. Each lane leaves its value and
 * waits; the last one to arrive lets all go on. The values stay until each of the lanes comes to its next collective,
 * so lanes that run ahead disturb none that is late; at most 32 meetings of a warp can be in use then, one a lane.
 *
 * Stricter than a GPU, as the CUDA guide asks: all threads of a block come to the same barrier in the source, and none
 * may have ended before it.
 */
#include "fiber.h"
#include "internal.h"
#include "warp.h"

#include <cstdio>
#include <cstring>
#include <memory>

namespace cuda_on_cpu
{

enum : unsigned { LANES = 32, MAX_WARPS = 32, MAX_THREADS = 1024, MAX_EXCHANGE_BYTES = 64 };

struct Meeting {
    const char *what; /* the collective */
    uint32_t mask, arrived;
    uint32_t readers; /* lanes that may still look at the values */
    size_t bytes;     /* of a value */
    alignas(64) unsigned char values[LANES * MAX_EXCHANGE_BYTES];
};

struct Warp {
    uint32_t alive = 0, ready = 0; /* lanes that have not ended; lanes that can run and do not */
    uint32_t open, free_meetings;  /* indices of meetings: not complete; not in use */
    Meeting meetings[LANES];
};

struct Thread {
    uint3 index;
    unsigned lane;
    Warp *warp;
    Fiber *fiber;          /* null before it begins */
    Meeting *meeting;      /* the one whose values it may still look at */
    const char *waits_for; /* null: it does not wait */
    Place place;
    uint32_t waits_for_lanes; /* 0: for the whole block */
    ThreadHook hook;
};

struct Barrier {
    const char *what; /* of the first thread that waits there */
    Place place;
    unsigned arrived, yes, result;
};

struct Block {
    Thread threads[MAX_THREADS];
    Warp warps[MAX_WARPS];
    unsigned count, alive;
    uint32_t ready_warps; /* warps with ready lanes */
    Barrier barrier;
    const Grid *grid;
    Random random;
    Fiber *home;
    std::vector<Fiber *> all, idle;
    SharedMemory shared;

    Block() : home(fiber_of_os_thread()) { watch_faults_of_thread(); }
    ~Block()
    {
        for (Fiber *f : all) fiber_free(f);
        fiber_free(home);
    }
};

__thread Running running = {};
static __thread Block *block; /* the one of this OS thread, while it runs a block */

/* ---- messages ---- */

static std::string place_text(Place place)
{
    return place.file ? std::string(" at ") + place.file + ":" + std::to_string(place.line) : "";
}

std::string running_place()
{
    if (!block) return "";
    char text[160];
    const uint3 &b = running.block_index;
    std::string place = std::string("kernel ") + block->grid->kernel;
    snprintf(text, sizeof text, ", block (%u, %u, %u)", b.x, b.y, b.z);
    place += text;
    if (running.thread) {
        snprintf(text, sizeof text, ", thread (%u, %u, %u)", threadIdx.x, threadIdx.y, threadIdx.z);
        place += text;
    }
    return place;
}

static bool waits(const Thread &t) { return t.waits_for && !(t.warp->ready >> t.lane & 1); }

static bool wait_together(const Thread &t, const Thread &u)
{
    return waits(t) && waits(u) && !strcmp(t.waits_for, u.waits_for) && t.place.line == u.place.line &&
           t.waits_for_lanes == u.waits_for_lanes;
}

/* Who waits where: threads with the same reason in one line. */
static std::string waiting_threads(const Block &b)
{
    std::string lines;
    for (unsigned first = 0, next; first < b.count; first = next) {
        const Thread &t = b.threads[first];
        for (next = first + 1; next < b.count && wait_together(t, b.threads[next]);) next++;
        if (!waits(t)) continue;
        char text[96];
        snprintf(text, sizeof text, "\n    threads %u to %u wait at ", first, next - 1);
        lines += text + std::string(t.waits_for) + place_text(t.place);
        if (t.waits_for_lanes) {
            snprintf(text, sizeof text, " for the lanes %08x", t.waits_for_lanes);
            lines += text;
        }
    }
    return lines;
}

[[noreturn]] static void deadlock(const Block &b)
{
    std::string threads = waiting_threads(b);
    fail("deadlock: no thread of the block can go on (divergent barrier or warp collective)%s", threads.c_str());
}

/* ---- whose turn it is ---- */

static unsigned lowest(uint32_t bits) { return (unsigned)__builtin_ctz(bits); }
static unsigned highest(uint32_t bits) { return 31u - (unsigned)__builtin_clz(bits); }

static unsigned any_of(uint32_t bits, Random &random)
{
    for (uint32_t skip = random.below((uint32_t)__builtin_popcount(bits)); skip; skip--) bits &= bits - 1;
    return lowest(bits);
}

static unsigned before_first() { return settings().order == Order::forward ? 31 : 0; }

/* Of the bits set, the next one in the order, `now` having had its turn. */
static unsigned next_bit(uint32_t bits, unsigned now, Block &b)
{
    uint32_t up_to_now = 0xffffffffu >> (31 - now);
    switch (settings().order) {
    case Order::forward:
        return lowest(bits & ~up_to_now ? bits & ~up_to_now : bits);
    case Order::reverse:
        return highest(bits & up_to_now >> 1 ? bits & up_to_now >> 1 : bits);
    default:
        return any_of(bits, b.random);
    }
}

static void make_ready(Block &b, Warp &w, uint32_t lanes)
{
    w.ready |= lanes;
    b.ready_warps |= 1u << (&w - b.warps);
}

static void make_busy(Block &b, Warp &w, unsigned lane)
{
    w.ready &= ~(1u << lane);
    if (!w.ready) b.ready_warps &= ~(1u << (&w - b.warps));
}

static Thread *take(Block &b, unsigned warp, unsigned lane)
{
    make_busy(b, b.warps[warp], lane);
    return &b.threads[warp * LANES + lane];
}

/* A warp after `warp`, from its first lane on. */
static Thread *take_from_next_warp(Block &b, unsigned warp)
{
    warp = next_bit(b.ready_warps, warp, b);
    return take(b, warp, next_bit(b.warps[warp].ready, before_first(), b));
}

/* Null when no thread can go on. */
static Thread *take_next(Block &b, const Thread &now)
{
    if (!b.ready_warps) return nullptr;
    if (settings().order == Order::random || !now.warp->ready)
        return take_from_next_warp(b, (unsigned)(now.warp - b.warps));
    return take(b, (unsigned)(now.warp - b.warps), next_bit(now.warp->ready, now.lane, b));
}

static void set_running(Thread *t)
{
    running.thread = t;
    running.thread_index = &t->index;
    running.lane = t->lane;
    t->waits_for = nullptr;
}

static void play_threads();

static Fiber *idle_fiber(Block &b)
{
    if (b.idle.empty()) {
        b.all.push_back(fiber_create(play_threads, (int)b.all.size()));
        return b.all.back();
    }
    Fiber *f = b.idle.back();
    b.idle.pop_back();
    return f;
}

static void go_on_with(Block &b, Fiber *from, Thread *t)
{
    if (!t->fiber) t->fiber = idle_fiber(b);
    set_running(t);
    fiber_switch(from, t->fiber);
}

/* The running thread has nothing to do until somebody makes it ready. */
static void wait(Block &b, const char *what, Place place, uint32_t lanes)
{
    Thread &t = *running.thread;
    t.waits_for = what;
    t.place = place;
    t.waits_for_lanes = lanes;
    Thread *next = take_next(b, t);
    if (!next) deadlock(b);
    if (next != &t)
        go_on_with(b, t.fiber, next);
    else
        set_running(&t);
}

/* The last one to arrive: in random order it does not go on before the others. */
static void take_turns(Block &b, const char *what, Place place)
{
    if (settings().order != Order::random) return;
    Thread &t = *running.thread;
    make_ready(b, *t.warp, 1u << t.lane);
    wait(b, what, place, 0);
}

/* ---- the barrier of the block ---- */

[[noreturn]] static void divergent(const Block &b, const char *why)
{
    std::string threads = waiting_threads(b);
    fail("divergent barrier: %s%s", why, threads.c_str());
}

int block_barrier(const char *what, bool predicate, Place place)
{
    if (!block || !running.thread) fail("%s outside of a kernel", what);
    Block &b = *block;
    Barrier &barrier = b.barrier;
    if (b.alive != b.count) {
        std::string why = what + place_text(place) + " after a thread of the block has ended";
        divergent(b, why.c_str());
    }
    if (barrier.arrived == 0) {
        barrier.what = what;
        barrier.place = place;
    } else if (barrier.place.line != place.line || strcmp(barrier.what, what) ||
               strcmp(barrier.place.file, place.file)) {
        std::string why = "this thread comes to " + (what + place_text(place));
        divergent(b, why.c_str());
    }
    barrier.arrived++;
    barrier.yes += predicate;
    if (barrier.arrived < b.count) {
        wait(b, what, place, 0);
        return (int)barrier.result;
    }
    int result = (int)barrier.yes;
    barrier = Barrier{nullptr, {}, 0, 0, barrier.yes};
    for (unsigned w = 0; w * LANES < b.count; w++) make_ready(b, b.warps[w], b.warps[w].alive);
    make_busy(b, *running.thread->warp, running.lane);
    take_turns(b, what, place);
    return result;
}

/* ---- collectives of a warp ---- */

static void leave_meeting(Thread &t)
{
    if (!t.meeting) return;
    if (--t.meeting->readers == 0) t.warp->free_meetings |= 1u << (t.meeting - t.warp->meetings);
    t.meeting = nullptr;
}

/* The open meeting of exactly these lanes, or a new one. */
static Meeting &join_meeting(Warp &w, const char *what, uint32_t mask, size_t bytes)
{
    for (uint32_t open = w.open; open; open &= open - 1) {
        Meeting &m = w.meetings[lowest(open)];
        if (m.mask != mask) continue;
        if (m.bytes != bytes || (m.what != what && strcmp(m.what, what) != 0))
            fail("divergent warp: this lane comes to %s, others of the lanes %08x wait at %s", what, mask, m.what);
        return m;
    }
    unsigned i = lowest(w.free_meetings);
    w.free_meetings &= ~(1u << i);
    w.open |= 1u << i;
    Meeting &m = w.meetings[i];
    m.what = what;
    m.mask = mask;
    m.arrived = m.readers = 0;
    m.bytes = bytes;
    return m;
}

/* Lets all go on when nobody is missing: lanes that have ended are not waited for. */
static bool complete(Block &b, Warp &w, Meeting &m, uint32_t last)
{
    uint32_t expected = m.mask & w.alive;
    if ((m.arrived & expected) != expected) return false;
    w.open &= ~(1u << (&m - w.meetings));
    for (uint32_t absent = ~m.arrived; absent; absent &= absent - 1)
        memset(m.values + lowest(absent) * m.bytes, 0xff, m.bytes);
    if (m.arrived & ~last) make_ready(b, w, m.arrived & ~last);
    return true;
}

const void *warp_exchange(const char *what, uint32_t mask, const void *mine, size_t bytes, Place place)
{
    if (!block || !running.thread) fail("%s outside of a kernel", what);
    Block &b = *block;
    Thread &t = *running.thread;
    uint32_t me = 1u << t.lane;
    if (!(mask & me)) {
        std::string where = place_text(place);
        fail("%s%s: lane %u is not in its mask %08x", what, where.c_str(), t.lane, mask);
    }
    leave_meeting(t);
    Meeting &m = join_meeting(*t.warp, what, mask, bytes);
    memcpy(m.values + t.lane * bytes, mine, bytes);
    m.arrived |= me;
    m.readers++;
    t.meeting = &m;
    if (complete(b, *t.warp, m, me))
        take_turns(b, what, place);
    else
        wait(b, what, place, mask);
    return m.values;
}

uint32_t lanes_alive() { return running.thread->warp->alive; }

ThreadHook &thread_hook() { return running.thread->hook; }

unsigned running_thread_number() { return (unsigned)(running.thread - block->threads); }

/* ---- from a block's first thread to its last ---- */

static void thread_ends(Block &b, Thread &t)
{
    if (t.hook.data) t.hook.at_end(t.hook.data);
    t.hook.data = nullptr;
    leave_meeting(t);
    Warp &w = *t.warp;
    w.alive &= ~(1u << t.lane);
    b.alive--;
    if (b.barrier.arrived) divergent(b, "this thread has ended, others of the block wait");
    for (uint32_t open = w.open; open; open &= open - 1) complete(b, w, w.meetings[lowest(open)], 0);
}

/* What every fiber does: a thread from its beginning to its end, then another. */
static void play_threads()
{
    Block &b = *block;
    for (;;) {
        (*b.grid->thread)();
        Thread &t = *running.thread;
        thread_ends(b, t);
        Thread *next = take_next(b, t);
        if (next && !next->fiber) {
            next->fiber = t.fiber;
            set_running(next);
            continue;
        }
        b.idle.push_back(t.fiber);
        if (next)
            go_on_with(b, t.fiber, next);
        else if (b.alive)
            deadlock(b);
        else
            fiber_switch(t.fiber, b.home);
    }
}

static void set_up(Block &b, const Grid &grid, uint64_t block_number)
{
    dim3 dim = grid.configuration.block;
    b.grid = &grid;
    b.count = b.alive = dim.x * dim.y * dim.z;
    b.ready_warps = 0;
    b.barrier = Barrier{};
    b.random.state = Random{settings().order_seed}.next() + (grid.number << 40) + block_number;
    for (unsigned first = 0; first < b.count; first += LANES) {
        Warp &w = b.warps[first / LANES];
        unsigned lanes = b.count - first < LANES ? b.count - first : LANES;
        w.alive = 0xffffffffu >> (LANES - lanes);
        w.ready = w.open = 0;
        w.free_meetings = 0xffffffffu;
        make_ready(b, w, w.alive);
    }
    uint3 index = {0, 0, 0};
    for (unsigned i = 0; i < b.count; i++) {
        Thread &t = b.threads[i];
        t.index = index;
        t.lane = i % LANES;
        t.warp = &b.warps[i / LANES];
        t.fiber = nullptr;
        t.meeting = nullptr;
        t.waits_for = nullptr;
        t.hook.data = nullptr;
        if (++index.x < dim.x) continue;
        index.x = 0;
        if (++index.y < dim.y) continue;
        index.y = 0;
        index.z++;
    }
}

void run_block(const Grid &grid, uint3 block_index, uint64_t block_number)
{
    static thread_local std::unique_ptr<Block> own;
    if (!own) own.reset(new Block());
    block = own.get();
    Block &b = *block;
    running.block_index = block_index;
    running.block_dim = grid.configuration.block;
    running.grid_dim = grid.configuration.grid;
    set_up(b, grid, block_number);
    b.shared.begin(grid.configuration.shared, grid.shared_limit);
    go_on_with(b, b.home, take_from_next_warp(b, before_first()));
    running.thread = nullptr;
    b.shared.end();
    if (counting) count_block(grid.counters);
    block = nullptr;
}

void *shared_address(const SharedVariable &variable)
{
    if (!block) fail("shared variable %s outside of a kernel", variable.name);
    return block->shared.address(variable);
}

void *dynamic_shared()
{
    if (!block) fail("dynamic shared memory outside of a kernel");
    return block->shared.dynamic();
}

void check_shared(const char *name, const void *at, size_t bytes, size_t alignment)
{
    if (!block) fail("%s outside of a kernel", name);
    if (!block->shared.holds(at, bytes)) fail("%s: %p is not in a shared variable of this block", name, at);
    if ((uintptr_t)at % alignment) fail("%s: %p is not a multiple of %zu", name, at, alignment);
}

} // namespace cuda_on_cpu
