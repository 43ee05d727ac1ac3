/* The environment variables of cuda_on_cpu, read once, and the messages that end a program: those of fail(), and an
 * explanation of a fault of the host. AddressSanitizer explains faults itself; then only the running thread is
 * added. */
#include "fiber.h"
#include "internal.h"

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace cuda_on_cpu
{

/* ---- the environment ---- */

[[noreturn]] static void bad_setting(const char *name, const char *value, const char *expected)
{
    fail("%s=%s: expected %s", name, value, expected);
}

/* The number after `prefix`, when value starts with it and nothing follows. */
static bool number_after(const char *value, const char *prefix, uint64_t *number)
{
    size_t length = strlen(prefix);
    if (strncmp(value, prefix, length) != 0 || value[length] < '0' || value[length] > '9') return false;
    char *end;
    *number = strtoull(value + length, &end, 10);
    return *end == '\0';
}

static Settings read_settings()
{
    Settings s = {Order::forward, 0, false, 0, false, 10, 0, (size_t)16 << 30, 8};
    if (const char *order = getenv("CUDA_ON_CPU_ORDER")) {
        if (strcmp(order, "forward") == 0)
            s.order = Order::forward;
        else if (strcmp(order, "reverse") == 0)
            s.order = Order::reverse;
        else if (number_after(order, "random:", &s.order_seed))
            s.order = Order::random;
        else
            bad_setting("CUDA_ON_CPU_ORDER", order, "forward, reverse or random:SEED");
    }
    if (const char *streams = getenv("CUDA_ON_CPU_STREAMS")) {
        if (number_after(streams, "shuffle:", &s.stream_seed))
            s.shuffle_streams = true;
        else if (strcmp(streams, "in-order") != 0)
            bad_setting("CUDA_ON_CPU_STREAMS", streams, "in-order or shuffle:SEED");
    }
    if (const char *stats = getenv("CUDA_ON_CPU_STATS")) {
        if (strcmp(stats, "1") == 0)
            s.stats = true;
        else if (strcmp(stats, "0") != 0)
            bad_setting("CUDA_ON_CPU_STATS", stats, "0 or 1");
    }
    if (const char *capability = getenv("CUDA_ON_CPU_CAPABILITY")) {
        char more;
        if (sscanf(capability, "%2d.%1d%c", &s.capability_major, &s.capability_minor, &more) != 2)
            bad_setting("CUDA_ON_CPU_CAPABILITY", capability, "a compute capability as 10.0");
    }
    if (const char *memory = getenv("CUDA_ON_CPU_MEMORY_MB")) {
        uint64_t megabytes;
        if (!number_after(memory, "", &megabytes)) bad_setting("CUDA_ON_CPU_MEMORY_MB", memory, "a number of MiB");
        s.memory_bytes = (size_t)megabytes << 20;
    }
    if (const char *devices = getenv("CUDA_ON_CPU_DEVICES")) {
        uint64_t count;
        if (!number_after(devices, "", &count) || count < 1 || count > 1024)
            bad_setting("CUDA_ON_CPU_DEVICES", devices, "a number from 1 to 1024");
        s.devices = (int)count;
    }
    return s;
}

const Settings &settings()
{
    static const Settings s = read_settings();
    return s;
}

/* ---- messages ---- */

void fail(const char *format, ...)
{
    static std::mutex one_message; /* never given back: what other OS threads find is not printed as well */
    one_message.lock();
    fflush(stdout);
    fputs("cuda_on_cpu: ", stderr);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::string place = running_place();
    if (!place.empty()) fprintf(stderr, "\n    in %s", place.c_str());
    fputc('\n', stderr);
    fflush(stderr);
    abort();
}

/* ---- faults of the host: a device pointer followed, or a stack used up ---- */

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
