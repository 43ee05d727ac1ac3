/* Counters per kernel: launches and threads always, bytes and sectors of device memory while counting is on.
 *
 * A request is what a GPU's warp sends to memory at once: here the k-th access at one call site by each of its lanes.
 * Its sectors are the distinct 32-byte pieces that it touches. Accesses of a block are kept until the block ends, then
 * sorted by request and counted: slow, and exact as long as the lanes of a warp take the same way.
 */
#include "internal.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

namespace cuda_on_cpu
{

struct Counters {
    std::atomic<uint64_t> launches{0}, threads{0}, bytes[2]{}, sectors[2]{}; /* [write] */
};

struct AllCounters {
    std::map<std::string, std::unique_ptr<Counters>> by_kernel;
    std::mutex lock;
};
static AllCounters &all()
{
    static AllCounters *a = new AllCounters;
    return *a;
}

std::atomic<bool> counting{settings().stats};

static std::string base_name(const char *kernel)
{
    const char *end = strchr(kernel, '<');
    return end ? std::string(kernel, (size_t)(end - kernel)) : kernel;
}

Counters *counters_of(const char *kernel)
{
    std::lock_guard<std::mutex> guard(all().lock);
    auto &counters = all().by_kernel[base_name(kernel)];
    if (!counters) {
        static const bool print_at_exit = settings().stats && atexit(print_stats) == 0;
        (void)print_at_exit;
        counters.reset(new Counters);
    }
    return counters.get();
}

void count_launch(Counters *counters, uint64_t threads)
{
    counters->launches++;
    counters->threads += threads;
}

/* ---- bytes and sectors ---- */

struct Access {
    const void *site;
    unsigned warp, turn; /* turn: how many accesses at the site the lane made before */
    uintptr_t sector;
    bool write;
};

struct BlockAccesses {
    std::vector<Access> accesses;
    uint64_t bytes[2];
    std::vector<std::pair<const void *, unsigned>> turns[1024]; /* of each thread: per site */
};

static BlockAccesses &block_accesses()
{
    static thread_local std::unique_ptr<BlockAccesses> own;
    if (!own) own.reset(new BlockAccesses());
    return *own;
}

static unsigned next_turn(std::vector<std::pair<const void *, unsigned>> &turns, const void *site)
{
    for (auto &turn : turns)
        if (turn.first == site) return turn.second++;
    turns.emplace_back(site, 1);
    return 0;
}

void count_access(const void *call_site, uintptr_t device, size_t bytes, bool write)
{
    BlockAccesses &b = block_accesses();
    unsigned thread = running_thread_number(), turn = next_turn(b.turns[thread], call_site);
    b.accesses.push_back(Access{call_site, thread / 32, turn, device / 32, write});
    b.bytes[write] += bytes;
}

void count_block(Counters *counters)
{
    BlockAccesses &b = block_accesses();
    auto key = [](const Access &a) { return std::tie(a.site, a.warp, a.turn, a.sector, a.write); };
    std::sort(b.accesses.begin(), b.accesses.end(), [&](const Access &x, const Access &y) { return key(x) < key(y); });
    uint64_t sectors[2] = {0, 0};
    for (size_t i = 0; i < b.accesses.size(); i++)
        if (i == 0 || key(b.accesses[i]) != key(b.accesses[i - 1])) sectors[b.accesses[i].write]++;
    for (int write = 0; write < 2; write++) {
        counters->bytes[write] += b.bytes[write];
        counters->sectors[write] += sectors[write];
        b.bytes[write] = 0;
    }
    b.accesses.clear();
    for (auto &turns : b.turns) turns.clear();
}

/* ---- what tests ask ---- */

static KernelStats stats_of(const Counters &c)
{
    return KernelStats{c.launches, c.threads, c.bytes[0], c.bytes[1], c.sectors[0], c.sectors[1]};
}

KernelStats kernel_stats(const char *kernel)
{
    std::lock_guard<std::mutex> guard(all().lock);
    auto found = all().by_kernel.find(base_name(kernel));
    return found == all().by_kernel.end() ? KernelStats{} : stats_of(*found->second);
}

void count_accesses(bool on) { counting = on; }

void reset_stats()
{
    std::lock_guard<std::mutex> guard(all().lock);
    for (auto &entry : all().by_kernel) {
        Counters &c = *entry.second;
        c.launches = c.threads = 0;
        for (int write = 0; write < 2; write++) c.bytes[write] = c.sectors[write] = 0;
    }
}

void print_stats()
{
    std::lock_guard<std::mutex> guard(all().lock);
    fprintf(stderr, "%-40s %9s %12s %14s %14s %13s %13s\n", "kernel", "launches", "threads", "bytes read", "written",
            "sectors read", "written");
    for (auto &entry : all().by_kernel) {
        KernelStats s = stats_of(*entry.second);
        if (!s.launches) continue;
        fprintf(stderr, "%-40s %9llu %12llu %14llu %14llu %13llu %13llu\n", entry.first.c_str(),
                (unsigned long long)s.launches, (unsigned long long)s.threads, (unsigned long long)s.bytes_read,
                (unsigned long long)s.bytes_written, (unsigned long long)s.sectors_read,
                (unsigned long long)s.sectors_written);
    }
}

} // namespace cuda_on_cpu
