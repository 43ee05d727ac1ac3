/* Inside cuda_on_cpu: stacks that take turns on one OS thread.
 *
 * A fiber is a stack with an endless function on it. fiber_switch leaves one where it is and goes on with another; it
 * returns when somebody switches back. Fibers never change their OS thread. On x86-64 a switch saves the six registers
 * that a function must preserve; elsewhere, or with CUDA_ON_CPU_UCONTEXT defined, ucontext does it, slower.
 * AddressSanitizer is told of every switch.
 */
#ifndef CUDA_ON_CPU_FIBER_H
#define CUDA_ON_CPU_FIBER_H

namespace cuda_on_cpu
{

struct Fiber;

Fiber *fiber_of_os_thread();                       /* stands for the stack that this OS thread was given */
Fiber *fiber_create(void (*endless)(), int color); /* color: spreads the stacks over the sets of the caches */
void fiber_free(Fiber *f);                         /* not the running one */
void fiber_switch(Fiber *from, Fiber *to);         /* from: the running one */
bool is_stack_overflow(const void *address);       /* a fault there: the running fiber's stack is too small */

} // namespace cuda_on_cpu

#endif
