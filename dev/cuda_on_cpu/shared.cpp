/* The shared memory of one block, on the heap of the OS thread that plays it.
 *
 *     zone | dynamic | zone | first static variable met | zone | second | zone ...
 *
 * Variables are placed when the block's first thread reaches their declaration. Each is aligned as its type asks and
 * not more, so that a 16-byte access to an array of floats is seen to be misaligned. Variables begin as 0xff bytes
 * (NaN); zones hold another pattern, which is looked at when the block ends; AddressSanitizer reports an access at
 * once.
 */
#include "internal.h"

#include <cstdlib>
#include <cstring>

#ifdef CUDA_ON_CPU_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes)   ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes) ((void)0)
#endif

namespace cuda_on_cpu
{

enum : size_t { ZONE_BYTES = 1024, ARENA_BYTES = MAX_SHARED_BYTES + (128 << 10), DYNAMIC_ALIGNMENT = 1024 };
enum : int { UNWRITTEN = 0xff, ZONE = 0xa5 };

SharedMemory::SharedMemory() : static_bytes(0), limit(0), dynamic_variable{"(dynamic)", 0, DYNAMIC_ALIGNMENT}
{
    arena = (char *)aligned_alloc(DYNAMIC_ALIGNMENT, ARENA_BYTES);
    if (!arena) fail("no memory for the shared memory of a block");
    next = arena;
}

SharedMemory::~SharedMemory() { free(arena); }

static void lay_zone(char *begin)
{
    ASAN_UNPOISON_MEMORY_REGION(begin, ZONE_BYTES); /* the zone before it may reach into this one */
    memset(begin, ZONE, ZONE_BYTES);
    ASAN_POISON_MEMORY_REGION(begin, ZONE_BYTES);
}

void SharedMemory::begin(size_t dynamic_bytes, size_t most)
{
    limit = most;
    dynamic_variable.bytes = dynamic_bytes;
    if (dynamic_bytes) place(dynamic_variable);
}

char *SharedMemory::place(const SharedVariable &v)
{
    size_t alignment = v.alignment < 16 ? 16 : v.alignment;
    uintptr_t at = (uintptr_t)next + ZONE_BYTES;
    at = (at + alignment - 1) / alignment * alignment;
    if (v.alignment < 16) at += v.alignment; /* not a multiple of more than it asks for */
    char *begin = (char *)at;
    if (&v != &dynamic_variable) static_bytes += v.bytes;
    if (static_bytes > STATIC_SHARED_BYTES || static_bytes + dynamic_variable.bytes > limit)
        fail("with %s, shared memory of %zu bytes static (at most %zu), %zu dynamic (at most %zu in all)", v.name,
             static_bytes, (size_t)STATIC_SHARED_BYTES, dynamic_variable.bytes, limit);
    if (begin + v.bytes + 2 * ZONE_BYTES > arena + ARENA_BYTES) fail("too many shared variables with %s", v.name);
    lay_zone(begin - ZONE_BYTES);
    ASAN_UNPOISON_MEMORY_REGION(begin, v.bytes);
    memset(begin, UNWRITTEN, v.bytes);
    lay_zone(begin + v.bytes);
    next = begin + v.bytes;
    pieces.push_back(Piece{&v, begin, v.bytes});
    return begin;
}

void *SharedMemory::address(const SharedVariable &variable)
{
    for (const Piece &piece : pieces)
        if (piece.variable == &variable) return piece.begin;
    return place(variable);
}

void *SharedMemory::dynamic()
{
    if (!dynamic_variable.bytes) fail("dynamic shared memory in a launch that asked for none");
    return pieces[0].begin;
}

bool SharedMemory::holds(const void *at, size_t bytes) const
{
    for (const Piece &piece : pieces)
        if ((const char *)at >= piece.begin && (const char *)at + bytes <= piece.begin + piece.bytes) return true;
    return false;
}

static const char *first_change(const char *zone)
{
    for (size_t i = 0; i < ZONE_BYTES; i++)
        if ((unsigned char)zone[i] != ZONE) return zone + i;
    return nullptr;
}

void SharedMemory::end()
{
    ASAN_UNPOISON_MEMORY_REGION(arena, ARENA_BYTES);
    for (const Piece &piece : pieces) {
        if (const char *byte = first_change(piece.begin - ZONE_BYTES)) report(byte);
        if (const char *byte = first_change(piece.begin + piece.bytes)) report(byte);
    }
    pieces.clear();
    next = arena;
    static_bytes = 0;
}

/* A zone lies between two variables: the nearer one is named. */
void SharedMemory::report(const char *byte) const
{
    auto distance = [byte](const Piece &p) { return byte < p.begin ? p.begin - byte : byte - (p.begin + p.bytes) + 1; };
    const Piece *nearest = &pieces[0];
    for (const Piece &piece : pieces)
        if (distance(piece) < distance(*nearest)) nearest = &piece;
    fail("shared memory written outside of %s: at byte %td of its %zu", nearest->variable->name, byte - nearest->begin,
         nearest->bytes);
}

} // namespace cuda_on_cpu
