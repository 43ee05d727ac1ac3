/* A fault of the host, explained before the process ends by it: a device pointer followed by host code, or a kernel that
 * needs more stack than a fiber has. AddressSanitizer explains faults itself; then only the running thread is added. */
#include "fiber.h"
#include "internal.h"

#include <csignal>
#include <cstdio>

namespace cuda_on_cpu
{

#ifdef CUDA_ON_CPU_ASAN
void watch_faults() {}
void watch_faults_of_thread() {}

extern "C" void __asan_on_error()
{
    std::string place = running_place();
    if (!place.empty()) fprintf(stderr, "cuda_on_cpu: in %s\n", place.c_str());
}
#else
static void explain(int signal_number, siginfo_t *info, void *)
{
    const char *what = is_device_address(info->si_addr)   ? "a device pointer was followed as if it were the host's"
                       : is_stack_overflow(info->si_addr) ? "a thread needs more stack than it has"
                                                          : nullptr;
    if (what) {
        std::string place = running_place();
        fprintf(stderr, "cuda_on_cpu: %s (fault at %p)%s%s\n", what, info->si_addr, place.empty() ? "" : "\n    in ",
                place.c_str());
    }
    signal(signal_number, SIG_DFL); /* the faulting instruction runs again and ends the process */
}

void watch_faults()
{
    struct sigaction action = {}, before;
    action.sa_sigaction = explain;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    if (sigaction(SIGSEGV, nullptr, &before) == 0 && before.sa_handler == SIG_DFL) sigaction(SIGSEGV, &action, nullptr);
}

void watch_faults_of_thread()
{
    static thread_local char memory[32 << 10];
    stack_t stack = {};
    stack.ss_sp = memory;
    stack.ss_size = sizeof memory;
    sigaltstack(&stack, nullptr);
}
#endif

} // namespace cuda_on_cpu
