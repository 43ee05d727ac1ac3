/* Device memory and pinned memory.
 *
 * Device addresses come from a large reservation that nobody may touch, so a host that follows one faults; the data
 * live elsewhere. Every allocation begins in a granule of addresses of its own, and a table with an entry per granule
 * leads from an address to its allocation without a search or a lock:
 *
 *     reservation  | granule 0     | granule 1     | granule 2     | ...
 *                    .[allocation A.............]...[B]...
 *     table        | A             | A             | B             | ...
 *
 * Addresses are not used twice, so that an access to freed memory is told from any other. An allocation begins at a
 * multiple of 256 and not of more, as cudaMalloc promises, and ends at the byte asked for.
 */
#include "internal.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

namespace cuda_on_cpu
{

enum : size_t { GRANULE = (size_t)2 << 20, LARGEST_RESERVATION = (size_t)16 << 40, OFFSET = 256 };
enum : int { UNWRITTEN = 0xff };

struct Allocation {
    uintptr_t begin; /* device address */
    size_t bytes;
    char *data; /* null once freed */
};

struct DeviceHeap {
    uintptr_t begin;
    size_t granules, used, bytes_in_use;
    std::atomic<Allocation *> *table;
    std::deque<Allocation> allocations; /* all that were ever made */
    std::mutex lock;                    /* of all but reading the table */

    DeviceHeap() : used(0), bytes_in_use(0)
    {
        size_t bytes = LARGEST_RESERVATION;
        void *memory;
        while ((memory = reserve(bytes, PROT_NONE)) == MAP_FAILED)
            if ((bytes /= 2) < GRANULE) fail("no address space for device memory");
        begin = ((uintptr_t)memory + GRANULE - 1) / GRANULE * GRANULE;
        granules = bytes / GRANULE - 1;
        memory = reserve(granules * sizeof table[0], PROT_READ | PROT_WRITE);
        if (memory == MAP_FAILED) fail("no address space for the table of device memory");
        table = (std::atomic<Allocation *> *)memory; /* pages of zeros: null pointers */
        watch_faults();
    }
    static void *reserve(size_t bytes, int protection)
    {
        return mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    bool holds(uintptr_t at) const { return at - begin < granules * GRANULE; }
    Allocation *find(uintptr_t at) const
    {
        return holds(at) ? table[(at - begin) / GRANULE].load(std::memory_order_acquire) : nullptr;
    }
};

static DeviceHeap &heap()
{
    static DeviceHeap *h = new DeviceHeap; /* to the end of the process: work of other threads may still use it */
    return *h;
}

bool is_device_address(const void *p) { return heap().holds((uintptr_t)p); }

/* ---- checked access ---- */

/* Says what is wrong with an access that is not wholly inside a live allocation. */
[[noreturn]] static void bad_address(const void *device, size_t bytes, const char *who)
{
    uintptr_t at = (uintptr_t)device;
    if (!device) fail("%s of %zu bytes at a null pointer", who, bytes);
    if (!heap().holds(at))
        fail("%s of %zu bytes at %p, which is a host pointer (or no pointer at all)", who, bytes, device);
    const Allocation *a = heap().find(at);
    if (!a) fail("%s of %zu bytes at %p: no device memory was allocated there", who, bytes, device);
    if (!a->data)
        fail("%s of %zu bytes at byte %td of an allocation of %zu that has been freed", who, bytes,
             (ptrdiff_t)(at - a->begin), a->bytes);
    fail("%s of %zu bytes out of bounds: at byte %td of an allocation of %zu", who, bytes, (ptrdiff_t)(at - a->begin),
         a->bytes);
}

static inline bool inside(const Allocation *a, uintptr_t at, size_t bytes)
{
    return a && a->data && at >= a->begin && bytes <= a->bytes && at - a->begin <= a->bytes - bytes;
}

void *device_memory(const void *device, size_t bytes, const char *who)
{
    const Allocation *a = heap().find((uintptr_t)device);
    if (!inside(a, (uintptr_t)device, bytes)) bad_address(device, bytes, who);
    return a->data + ((uintptr_t)device - a->begin);
}

__attribute__((noinline)) void *global_access(const void *device, size_t bytes, bool write)
{
    uintptr_t at = (uintptr_t)device;
    const Allocation *a = heap().find(at);
    if (!inside(a, at, bytes)) bad_address(device, bytes, write ? "store" : "load");
    if (at & (bytes - 1)) {
        fail("misaligned %s of %zu bytes: at byte %td of an allocation", write ? "store" : "load", bytes,
             (ptrdiff_t)(at - a->begin));
    }
    if (!running.thread) fail("host code %s device memory", write ? "stores to" : "loads from");
    if (counting) count_access(__builtin_return_address(0), at, bytes, write);
    return a->data + (at - a->begin);
}

/* ---- pinned memory ---- */

struct PinnedMemory {
    std::map<uintptr_t, size_t> blocks; /* first byte, bytes */
    std::mutex lock;
};
static PinnedMemory &pinned()
{
    static PinnedMemory *p = new PinnedMemory;
    return *p;
}

/* Pinned bytes from p on; 0 when p is pageable. */
static size_t pinned_bytes(const void *p)
{
    std::lock_guard<std::mutex> guard(pinned().lock);
    auto after = pinned().blocks.upper_bound((uintptr_t)p);
    if (after == pinned().blocks.begin()) return 0;
    auto block = std::prev(after);
    size_t offset = (uintptr_t)p - block->first;
    return offset < block->second ? block->second - offset : 0;
}

/* ---- copies ---- */

enum class Side { host, device };

static void check_side(const char *call, const char *argument, const void *p, size_t bytes, Side expected)
{
    bool device = is_device_address(p);
    if (device && expected == Side::host)
        fail("%s: %s %p is a device pointer, a host pointer is asked for", call, argument, p);
    if (!device && expected == Side::device)
        fail("%s: %s %p is a host pointer, a device pointer is asked for", call, argument, p);
    if (device)
        device_memory(p, bytes, call);
    else if (size_t pinned = pinned_bytes(p)) {
        if (pinned < bytes) fail("%s: %s has %zu pinned bytes, %zu are asked for", call, argument, pinned, bytes);
    }
}

static void *host_address(void *p, size_t bytes, Side side, const char *call)
{
    return side == Side::device ? device_memory(p, bytes, call) : p;
}

/* As a GPU's driver does it: what a copy to the device reads of pageable memory is read at the call, and a copy to
 * pageable memory is over when the call returns. Pinned memory is read and written when the stream gets there. */
static cudaError_t copy(const char *call, void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                        cudaStream_t stream, bool wait)
{
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return set_error(cudaErrorInvalidMemcpyDirection);
    if (bytes == 0) return cudaSuccess;
    if (kind == cudaMemcpyDefault) {
        bool to_device = is_device_address(to), from_device = is_device_address(from);
        kind = from_device ? (to_device ? cudaMemcpyDeviceToDevice : cudaMemcpyDeviceToHost)
                           : (to_device ? cudaMemcpyHostToDevice : cudaMemcpyHostToHost);
    }
    Side target = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice ? Side::device : Side::host;
    Side source = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice ? Side::device : Side::host;
    check_side(call, "destination", to, bytes, target);
    check_side(call, "source", from, bytes, source);

    std::shared_ptr<char> staged;
    if (stream_work_waits() && source == Side::host && !pinned_bytes(from)) {
        staged.reset((char *)malloc(bytes), free);
        if (!staged) fail("%s: no memory", call);
        memcpy(staged.get(), from, bytes);
    }
    enqueue(stream, [=] {
        const void *source_bytes = staged ? staged.get() : host_address((void *)from, bytes, source, call);
        memmove(host_address(to, bytes, target, call), source_bytes, bytes);
    });
    if (wait || (target == Side::host && !pinned_bytes(to))) wait_for_stream(stream);
    return cudaSuccess;
}

static cudaError_t set(const char *call, void *device, int value, size_t bytes, cudaStream_t stream)
{
    if (bytes == 0) return cudaSuccess;
    check_side(call, "destination", device, bytes, Side::device);
    enqueue(stream, [=] { memset(device_memory(device, bytes, call), value, bytes); });
    return cudaSuccess;
}

static cudaError_t allocate_pinned(void **p, size_t bytes)
{
    *p = nullptr;
    if (bytes == 0) return cudaSuccess;
    void *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!memory) return set_error(cudaErrorMemoryAllocation);
    memset(memory, UNWRITTEN, bytes);
    std::lock_guard<std::mutex> guard(pinned().lock);
    pinned().blocks[(uintptr_t)memory] = bytes;
    *p = memory;
    return cudaSuccess;
}

static cudaError_t allocate_device(void **p, size_t bytes)
{
    DeviceHeap &h = heap();
    std::lock_guard<std::mutex> guard(h.lock);
    *p = nullptr;
    if (bytes == 0) return cudaSuccess;
    if (bytes > settings().memory_bytes - h.bytes_in_use) return set_error(cudaErrorMemoryAllocation);
    size_t granules = (OFFSET + bytes + GRANULE) / GRANULE; /* at least a byte of gap before the next one */
    if (granules > h.granules - h.used) return set_error(cudaErrorMemoryAllocation);
    void *data = DeviceHeap::reserve(bytes, PROT_READ | PROT_WRITE);
    if (data == MAP_FAILED) return set_error(cudaErrorMemoryAllocation);
#ifdef MADV_HUGEPAGE
    madvise(data, bytes, MADV_HUGEPAGE); /* the pattern touches every page: fewer faults */
#endif
    memset(data, UNWRITTEN, bytes);
    h.allocations.push_back(Allocation{h.begin + h.used * GRANULE + OFFSET, bytes, (char *)data});
    Allocation *a = &h.allocations.back();
    for (size_t i = 0; i < granules; i++) h.table[h.used + i].store(a, std::memory_order_release);
    h.used += granules;
    h.bytes_in_use += bytes;
    *p = (void *)a->begin;
    return cudaSuccess;
}

static void free_device(void *p)
{
    wait_for_device();
    DeviceHeap &h = heap();
    std::lock_guard<std::mutex> guard(h.lock);
    Allocation *a = h.find((uintptr_t)p);
    if (!a) fail("cudaFree of %p, which is not device memory", p);
    if (a->begin != (uintptr_t)p) fail("cudaFree of %p, which is not the beginning of an allocation", p);
    if (!a->data) fail("cudaFree of %p a second time", p);
    munmap(a->data, a->bytes);
    a->data = nullptr;
    h.bytes_in_use -= a->bytes;
}

} // namespace cuda_on_cpu

using namespace cuda_on_cpu;

/* ---- the runtime's functions ---- */

cudaError_t cudaMalloc(void **p, size_t bytes) { return allocate_device(p, bytes); }

cudaError_t cudaFree(void *p)
{
    if (p) free_device(p);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    std::lock_guard<std::mutex> guard(heap().lock);
    *total = settings().memory_bytes;
    *available = *total - heap().bytes_in_use;
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **p, size_t bytes) { return allocate_pinned(p, bytes); }
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) { return allocate_pinned(p, bytes); }

cudaError_t cudaFreeHost(void *p)
{
    if (!p) return cudaSuccess;
    wait_for_device();
    std::lock_guard<std::mutex> guard(pinned().lock);
    if (!pinned().blocks.erase((uintptr_t)p)) fail("cudaFreeHost of %p, which cudaMallocHost did not give", p);
    free(p);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind)
{
    return copy("cudaMemcpy", to, from, bytes, kind, nullptr, true);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream)
{
    return copy("cudaMemcpyAsync", to, from, bytes, kind, stream, false);
}

cudaError_t cudaMemset(void *device, int value, size_t bytes)
{
    return set("cudaMemset", device, value, bytes, nullptr);
}

cudaError_t cudaMemsetAsync(void *device, int value, size_t bytes, cudaStream_t stream)
{
    return set("cudaMemsetAsync", device, value, bytes, stream);
}
