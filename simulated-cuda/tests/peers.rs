//! Kernels of two devices that wait for each other. By itself: the number of devices is the process's.
#![allow(unsafe_code, reason = "the driver's interface is C")]

use std::ffi::c_void;
use std::ptr::null_mut;

use simulated_cuda::driver::*;
use simulated_cuda::{script, status};

const FLOATS: usize = 1 << 16;
/// Words in front of the sums (`kernels/peers.cuh`), in bytes.
const SUMS: usize = 256;

struct Rank {
    context: usize,
    stream: usize,
    all_reduce: usize,
    exchange: usize,
    table: usize,
    hidden: usize,
}

impl Rank {
    /// A rank that brings a value to each element of a sum.
    unsafe fn open(device: i32, brings: f32) -> Self {
        let (mut context, mut stream, mut module, mut all_reduce) = (0, 0, 0, 0);
        let allocate = |bytes: usize| {
            let mut address = 0;
            // SAFETY: addresses of values of these types; here and below.
            assert_eq!(unsafe { cuMemAlloc_v2(&raw mut address, bytes) }, 0);
            address
        };
        // SAFETY: as above, and zero-terminated texts.
        unsafe {
            assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, device), 0);
            assert_eq!(cuCtxSetCurrent(context), 0);
            assert_eq!(cuStreamCreate(&raw mut stream, 1), 0);
            assert_eq!(cuModuleLoadData(&raw mut module, c"an image".as_ptr().cast()), 0);
            assert_eq!(cuModuleGetFunction(&raw mut all_reduce, module, c"all_reduce".as_ptr()), 0);
            let (exchange, table) = (allocate(SUMS + 8 * FLOATS), allocate(16));
            let hidden = allocate(4 * FLOATS);
            assert_eq!(cuMemsetD8Async(exchange, 0, SUMS + 8 * FLOATS, stream), 0);
            assert_eq!(cuMemsetD8Async(hidden, 0, 4 * FLOATS, stream), 0);
            let values = vec![brings; FLOATS];
            assert_eq!(
                cuMemcpyHtoDAsync_v2(exchange + SUMS, values.as_ptr() as usize, 4 * FLOATS, stream),
                0
            );
            assert_eq!(cuStreamSynchronize(stream), 0);
            Self { context, stream, all_reduce, exchange, table, hidden }
        }
    }

    unsafe fn enqueue(&self, mut rank: i32, exchanges: [usize; 2]) {
        let (mut table, mut hidden) = (self.table, self.hidden);
        let (mut ranks, mut patience) = (2_i32, 60_000_000_000_u64);
        let (mut at, mut other) = (SUMS as u64, (SUMS + 4 * FLOATS) as u64);
        let (mut slot, mut count) = (0_i32, FLOATS as u32);
        let mut arguments: [*mut c_void; 9] = [
            (&raw mut table).cast(),
            (&raw mut rank).cast(),
            (&raw mut ranks).cast(),
            (&raw mut patience).cast(),
            (&raw mut at).cast(),
            (&raw mut other).cast(),
            (&raw mut slot).cast(),
            (&raw mut count).cast(),
            (&raw mut hidden).cast(),
        ];
        // SAFETY: as many arguments of the kernel's sizes.
        unsafe {
            assert_eq!(cuCtxSetCurrent(self.context), 0);
            assert_eq!(cuMemcpyHtoDAsync_v2(self.table, exchanges.as_ptr() as usize, 16, self.stream), 0);
            let arguments = arguments.as_mut_ptr();
            let launched =
                cuLaunchKernel(self.all_reduce, 4, 1, 1, 256, 1, 1, 0, self.stream, arguments, null_mut());
            assert_eq!(launched, 0);
        }
    }

    unsafe fn sum(&self) -> Vec<f32> {
        let mut found = vec![0.0_f32; FLOATS];
        // SAFETY: as many bytes.
        unsafe {
            assert_eq!(cuCtxSetCurrent(self.context), 0);
            let to = found.as_mut_ptr() as usize;
            assert_eq!(cuMemcpyDtoHAsync_v2(to, self.hidden, 4 * FLOATS, self.stream), 0);
        }
        found
    }
}

#[test]
fn kernels_of_two_devices_wait_for_each_other_whoever_enqueues_them() {
    // SAFETY: no other thread of this process runs yet.
    unsafe { std::env::set_var(script::VARIABLE, "count=2") };
    // SAFETY: the driver's functions with addresses of values, as each of them wants.
    unsafe {
        assert_eq!(cuInit(0), 0);
        let ranks = [Rank::open(0, 1.0), Rank::open(1, 2.0)];
        let exchanges = [ranks[0].exchange, ranks[1].exchange];
        let mut can = 0;
        assert_eq!(cuDeviceCanAccessPeer(&raw mut can, 0, 1), 0);
        assert_eq!(can, 1);
        for (own, other) in [(0, 1), (1, 0)] {
            assert_eq!(cuCtxSetCurrent(ranks[own].context), 0);
            assert_eq!(cuCtxEnablePeerAccess(ranks[other].context, 0), 0);
            assert_eq!(cuCtxEnablePeerAccess(ranks[other].context, 0), status::PEER_ACCESS_ALREADY_ENABLED);
        }
        // Both by one thread, which waits for the first alone.
        let event = |record: bool, event: &mut usize| {
            assert_eq!(cuCtxSetCurrent(ranks[0].context), 0);
            if !record {
                assert_eq!(cuEventCreate(event, 0), 0);
            }
            assert_eq!(cuEventRecord(*event, ranks[0].stream), 0);
        };
        let (mut start, mut end) = (0, 0);
        event(false, &mut start);
        ranks[0].enqueue(0, exchanges);
        event(false, &mut end);
        ranks[1].enqueue(1, exchanges);
        assert!(ranks[0].sum().iter().all(|sum| *sum == 3.0));
        assert!(ranks[1].sum().iter().all(|sum| *sum == 3.0));
        // Half of the sum comes over the link, at 450 GB/s; the exchange of words and the time to begin are less than all of it.
        let mut ms = 0.0;
        assert_eq!(cuCtxSetCurrent(ranks[0].context), 0);
        assert_eq!(cuEventElapsedTime(&raw mut ms, start, end), 0);
        let link = 4.0 * FLOATS as f32 / 4.5e11 * 1e3;
        assert!((link..100.0 * link).contains(&ms), "{ms} ms, of which the link {link}");
        // Each by a thread of its own, one of which is late.
        std::thread::scope(|scope| {
            for (number, rank) in ranks.iter().enumerate() {
                scope.spawn(move || {
                    std::thread::sleep(std::time::Duration::from_millis(50 * number as u64));
                    // SAFETY: as above.
                    unsafe {
                        rank.enqueue(number as i32, exchanges);
                        assert!(rank.sum().iter().all(|sum| *sum == 6.0));
                    }
                });
            }
        });
    }
}
