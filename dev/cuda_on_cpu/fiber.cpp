/* Stacks that take turns: see fiber.h. Each stack is its own mapping with a guard below it, so that a kernel
 * that needs more than STACK_BYTES faults instead of writing into another thread's variables. */
#include "fiber.h"
#include "internal.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>

#ifdef CUDA_ON_CPU_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)
#define CUDA_ON_CPU_UCONTEXT
#endif
#ifdef CUDA_ON_CPU_UCONTEXT
#include <ucontext.h>
#endif

namespace cuda_on_cpu
{

enum : size_t {
#ifdef CUDA_ON_CPU_ASAN
    STACK_BYTES = 256 << 10, /* its red zones make frames several times as large */
#else
    STACK_BYTES = 64 << 10,
#endif
    GUARD_BYTES = 64 << 10, /* more than a function's frame, that might reach over less */
    MOST_GUARDS = 16 << 10
};

struct Fiber {
    void *stack_pointer; /* while it is not running */
    char *mapping;       /* guard, then the stack; null for an OS thread's own stack */
    const void *bottom;
    size_t bytes;
    void (*endless)();
    void *fake_stack; /* AddressSanitizer's, while it is not running */
#ifdef CUDA_ON_CPU_UCONTEXT
    ucontext_t context;
#endif
};

static __thread Fiber *current; /* of this OS thread; null before its first switch */

static void first_entry()
{
#ifdef CUDA_ON_CPU_ASAN
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
    current->endless();
    abort();
}

#ifndef CUDA_ON_CPU_UCONTEXT
/* cuda_on_cpu_switch(void **save, void *load): pushes what a function preserves, changes stacks, pops the same. */
extern "C" void cuda_on_cpu_switch(void **save, void *load);
extern "C" void cuda_on_cpu_first_entry() { first_entry(); }
extern "C" void cuda_on_cpu_trampoline();
asm(R"(
    .text
    .p2align 4
    .globl cuda_on_cpu_switch
    .type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size cuda_on_cpu_switch, . - cuda_on_cpu_switch
    .globl cuda_on_cpu_trampoline
    .type cuda_on_cpu_trampoline, @function
cuda_on_cpu_trampoline:
    xorl %ebp, %ebp
    call cuda_on_cpu_first_entry
    ud2
    .size cuda_on_cpu_trampoline, . - cuda_on_cpu_trampoline
)");

static void prepare(Fiber *f, char *top)
{
    uint64_t *sp = (uint64_t *)top;
    sp -= 2;                                   /* so that the trampoline finds the stack aligned to 16 */
    *--sp = (uint64_t)&cuda_on_cpu_trampoline; /* where the first switch returns to */
    for (int saved = 0; saved < 6; saved++) *--sp = 0;
    f->stack_pointer = sp;
}
static void change_stacks(Fiber *from, Fiber *to) { cuda_on_cpu_switch(&from->stack_pointer, to->stack_pointer); }
#else
static void prepare(Fiber *f, char *top)
{
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = (void *)f->bottom;
    f->context.uc_stack.ss_size = (size_t)(top - (char *)f->bottom);
    f->context.uc_link = nullptr;
    makecontext(&f->context, first_entry, 0);
}
static void change_stacks(Fiber *from, Fiber *to) { swapcontext(&from->context, &to->context); }
#endif

Fiber *fiber_of_os_thread()
{
    Fiber *f = (Fiber *)calloc(1, sizeof *f);
    if (!f) fail("no memory for the state of an OS thread");
#ifdef CUDA_ON_CPU_ASAN
    pthread_attr_t attributes;
    void *bottom = nullptr;
    if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
        pthread_attr_getstack(&attributes, &bottom, &f->bytes);
        pthread_attr_destroy(&attributes);
    }
    f->bottom = bottom;
#endif
    return f;
}

Fiber *fiber_create(void (*endless)(), int color)
{
    Fiber *f = (Fiber *)calloc(1, sizeof *f);
    size_t bytes = GUARD_BYTES + STACK_BYTES;
    void *mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!f || mapping == MAP_FAILED) fail("no memory for the stack of a thread");
    /* Linux gives a process 65530 mappings and a guard takes one: with many cores not every stack has one. */
    static std::atomic<int> guards{0};
    if (guards < (int)MOST_GUARDS && mprotect(mapping, GUARD_BYTES, PROT_NONE) == 0) guards++;
    f->mapping = (char *)mapping;
    f->bottom = f->mapping + GUARD_BYTES;
    f->bytes = STACK_BYTES;
    f->endless = endless;
    prepare(f, f->mapping + bytes - (color & 31) * 128);
    return f;
}

void fiber_free(Fiber *f)
{
    if (f->mapping) munmap(f->mapping, GUARD_BYTES + STACK_BYTES);
    free(f);
}

void fiber_switch(Fiber *from, Fiber *to)
{
    current = to;
#ifdef CUDA_ON_CPU_ASAN
    __sanitizer_start_switch_fiber(&from->fake_stack, to->bottom, to->bytes);
#endif
    change_stacks(from, to);
#ifdef CUDA_ON_CPU_ASAN
    __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}

bool is_stack_overflow(const void *address)
{
    const char *at = (const char *)address;
    return current && current->mapping && at >= current->mapping && at < current->mapping + GUARD_BYTES;
}

} // namespace cuda_on_cpu
