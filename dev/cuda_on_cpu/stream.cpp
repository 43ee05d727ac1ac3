/* Streams and events: when work runs.
 *
 * In order (the normal way): work runs inside the call that asks for it, so every event is over when it is recorded.
 *
 * Shuffled (CUDA_ON_CPU_STREAMS=shuffle:SEED): work waits in its stream's queue until somebody waits: for a stream, an
 * event, the device. Then streams take turns by chance, each in its own order, until what was waited for is over; the
 * rest stays queued. What is not ordered by events thus runs in any order, as late as possible.
 *
 * Order between streams is kept as points: "stream s has done n pieces of work". An event is the point at which it was
 * recorded; a piece of work has the points that must be reached before it. The legacy default stream (0) comes after
 * all work given before to streams that are not cudaStreamNonBlocking, and before all work given to them later.
 */
#include "internal.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

using Clock = std::chrono::steady_clock;

struct Point { /* the stream has done so many pieces of work */
    std::shared_ptr<CUstream_st> stream;
    uint64_t done;
    bool reached() const;
};

struct CUstream_st {
    struct Work {
        std::function<void()> run;
        std::vector<Point> after; /* to be reached first */
    };
    std::deque<Work> queue;
    uint64_t given = 0, done = 0; /* pieces of work */
    bool busy = false;            /* an OS thread runs its first piece */
    bool blocking = true;         /* ordered with the default stream */
};

bool Point::reached() const { return !stream || stream->done >= done; }

struct CUevent_st {
    Point point = {nullptr, 0}; /* no stream: never recorded */
    bool timing = true;
    std::shared_ptr<Clock::time_point> time; /* when it was reached */
};

namespace cuda_on_cpu
{

using Stream = std::shared_ptr<CUstream_st>;

struct Streams {
    std::vector<Stream> live; /* the first is the default stream */
    std::vector<cudaEvent_t> events;
    std::mutex lock;
    std::condition_variable changed;
    Random random;
    Streams() : live{std::make_shared<CUstream_st>()}, random{settings().stream_seed} {}
};
static Streams &streams()
{
    static Streams *s = new Streams;
    return *s;
}

using Lock = std::unique_lock<std::mutex>;

static Stream find(cudaStream_t stream)
{
    if (!stream || stream == cudaStreamLegacy) return streams().live[0];
    if (stream == cudaStreamPerThread) fail("cudaStreamPerThread is not played");
    for (const Stream &s : streams().live)
        if (s.get() == stream) return s;
    fail("a stream that does not exist (any more): %p", (void *)stream);
}

static cudaEvent_t check_event(cudaEvent_t event)
{
    auto &events = streams().events;
    if (std::find(events.begin(), events.end(), event) == events.end())
        fail("an event that does not exist (any more): %p", (void *)event);
    return event;
}

static bool is_default(const Stream &s) { return s == streams().live[0]; }

/* ---- shuffled ---- */

static bool can_run(const Stream &s)
{
    if (s->busy || s->queue.empty()) return false;
    for (const auto &point : s->queue.front().after)
        if (!point.reached()) return false;
    return true;
}

/* Runs the first piece of work of a stream taken by chance; false when there is none that can run. */
static bool run_one(Lock &lock)
{
    std::vector<Stream> able;
    for (const Stream &s : streams().live)
        if (can_run(s)) able.push_back(s);
    if (able.empty()) return false;
    Stream s = able[streams().random.below((uint32_t)able.size())];
    std::function<void()> run = std::move(s->queue.front().run);
    s->queue.pop_front();
    s->busy = true;
    lock.unlock();
    run();
    lock.lock();
    s->busy = false;
    s->done++;
    streams().changed.notify_all();
    return true;
}

/* Work of others may be what is waited for: then they run it. */
template <class Reached> static void run_until(Lock &lock, Reached reached)
{
    while (!reached())
        if (!run_one(lock)) streams().changed.wait(lock);
}

static void order_after(CUstream_st::Work &work, const Stream &s)
{
    if (s->done < s->given) work.after.push_back(Point{s, s->given});
}

static void put_in_queue(const Stream &s, CUstream_st::Work work)
{
    if (is_default(s)) {
        for (const Stream &other : streams().live)
            if (other->blocking && other != s) order_after(work, other);
    } else if (s->blocking) {
        order_after(work, streams().live[0]);
    }
    s->queue.push_back(std::move(work));
    s->given++;
}

bool stream_work_waits() { return settings().shuffle_streams; }

void enqueue(cudaStream_t stream, std::function<void()> work)
{
    Lock lock(streams().lock);
    Stream s = find(stream);
    if (stream_work_waits()) return put_in_queue(s, {std::move(work), {}});
    lock.unlock();
    work();
}

void wait_for_stream(cudaStream_t stream)
{
    Lock lock(streams().lock);
    Stream s = find(stream);
    uint64_t point = s->given;
    run_until(lock, [&] { return s->done >= point; });
    if (is_default(s)) { /* which comes after the blocking streams even when nothing was given to it */
        for (Stream &other : std::vector<Stream>(streams().live))
            if (other->blocking) run_until(lock, [&, goal = other->given] { return other->done >= goal; });
    }
}

void wait_for_device()
{
    Lock lock(streams().lock);
    std::vector<Stream> all = streams().live;
    for (const Stream &s : all) run_until(lock, [&, goal = s->given] { return s->done >= goal; });
}

} // namespace cuda_on_cpu

using namespace cuda_on_cpu;

/* ---- streams ---- */

static cudaError_t create_stream(cudaStream_t *stream, unsigned flags)
{
    if (flags != cudaStreamDefault && flags != cudaStreamNonBlocking) return set_error(cudaErrorInvalidValue);
    Lock lock(streams().lock);
    Stream s = std::make_shared<CUstream_st>();
    s->blocking = flags == cudaStreamDefault;
    streams().live.push_back(s);
    *stream = s.get();
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return create_stream(stream, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return create_stream(stream, flags); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int)
{
    return create_stream(stream, flags);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    if (!stream) return set_error(cudaErrorInvalidResourceHandle);
    wait_for_stream(stream);
    Lock lock(streams().lock);
    auto &live = streams().live;
    live.erase(std::find(live.begin(), live.end(), find(stream)));
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    wait_for_stream(stream);
    return cudaSuccess;
}

/* A query lets one piece of work run, so that a loop of queries ends. */
cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    Lock lock(streams().lock);
    Stream s = find(stream);
    if (s->done < s->given) run_one(lock);
    return set_error(s->done < s->given ? cudaErrorNotReady : cudaSuccess);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    Lock lock(streams().lock);
    const CUevent_st &e = *check_event(event);
    if (!e.point.reached()) put_in_queue(find(stream), {[] {}, {e.point}});
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
    enqueue(stream, [=] { function(data); });
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize()
{
    wait_for_device();
    return cudaSuccess;
}

/* ---- events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    Lock lock(streams().lock);
    *event = new CUevent_st;
    (*event)->timing = !(flags & cudaEventDisableTiming);
    streams().events.push_back(*event);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    auto time = std::make_shared<Clock::time_point>();
    enqueue(stream, [time] { *time = Clock::now(); });
    Lock lock(streams().lock);
    CUevent_st &e = *check_event(event);
    e.point.stream = find(stream);
    e.point.done = e.point.stream->given;
    e.time = time;
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    Lock lock(streams().lock);
    Point point = check_event(event)->point;
    run_until(lock, [&] { return point.reached(); });
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    Lock lock(streams().lock);
    Point point = check_event(event)->point;
    if (!point.reached()) run_one(lock);
    return set_error(point.reached() ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    Lock lock(streams().lock);
    const CUevent_st &from = *check_event(start), &to = *check_event(end);
    if (!from.timing || !to.timing || !from.point.stream || !to.point.stream)
        return set_error(cudaErrorInvalidResourceHandle);
    if (!from.point.reached() || !to.point.reached()) return set_error(cudaErrorNotReady);
    *ms = std::chrono::duration<float, std::milli>(*to.time - *from.time).count();
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    Lock lock(streams().lock);
    auto &events = streams().events;
    events.erase(std::find(events.begin(), events.end(), check_event(event)));
    delete event;
    return cudaSuccess;
}
