/* The environment variables of cuda_on_cpu, read once, and the messages that end a program. */
#include "internal.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace cuda_on_cpu
{

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
    Settings s = {Order::forward, 0, false, 0, false, 10, 0, (size_t)16 << 30};
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
    return s;
}

const Settings &settings()
{
    static const Settings s = read_settings();
    return s;
}

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

} // namespace cuda_on_cpu
