// Kernels of known duration: to check the timer, and to time a launch.
//
// spin       busy until the device's nanosecond timer has advanced by `nanoseconds`. Grid and block: one thread.
//            The timer (%globaltimer) ticks at 1 MHz on some devices, so a spin may be a tick too long.
// empty      waits for the kernel before it and returns: what remains is the launch, or the node of a graph.
//
// Bytes and FLOPs: none. Minimum architecture: sm_80.

#include "device.cuh"

HBMARK_KERNEL(spin, unsigned long long nanoseconds) {
    wait_for_dependency();
    const unsigned long long start = device_nanoseconds();
    while (device_nanoseconds() - start < nanoseconds) {
    }
}

HBMARK_KERNEL(empty) { wait_for_dependency(); }
