//! Allocations and copies.
//!
//! Enters: sizes and addresses. Leaves: memory of the device or of the host, and copies as work of streams. Pageable memory of the host is read at the
//! call and written before it returns; pinned memory when the stream comes to it.

use super::*;

impl Machine {
    pub(super) fn report_memory(&self, device: usize) {
        let memory = &self.devices[device].memory;
        let used = memory.used_plain + memory.used_pool + memory.used_graphs;
        crate::device::USED_BYTES[device].store(used as u64, std::sync::atomic::Ordering::Relaxed);
    }

    pub(super) fn has_room(&mut self) -> Answer<()> {
        self.allocations += 1;
        if self.script.out_of_memory == Some(self.allocations) { Err(status::OUT_OF_MEMORY) } else { Ok(()) }
    }

    pub fn allocate(&mut self, bytes: usize) -> Answer<usize> {
        let device = self.current()?;
        if bytes == 0 {
            return Err(status::INVALID_VALUE);
        }
        self.not_in_capture()?;
        self.has_room()?;
        let address =
            self.devices[device].memory.allocate(bytes, Kind::Plain).ok_or(status::OUT_OF_MEMORY)?;
        self.report_memory(device);
        Ok(address)
    }

    pub fn allocate_on(&mut self, bytes: usize, stream: usize) -> Answer<usize> {
        let handle = self.stream(stream)?;
        if bytes == 0 {
            return Err(status::INVALID_VALUE);
        }
        self.has_room()?;
        let device = self.streams[&handle].device;
        let captured = self.streams[&handle].capture.is_some();
        let kind = if captured { Kind::Graph } else { Kind::Pool };
        let address = self.devices[device].memory.allocate(bytes, kind).ok_or(status::OUT_OF_MEMORY)?;
        if let Some(capture) = self.streams.get_mut(&handle).and_then(|stream| stream.capture.as_mut()) {
            capture.allocations.push(address);
            self.push(stream, Item::Map(address))?;
        }
        self.report_memory(device);
        Ok(address)
    }

    pub(super) fn owner(&self, address: usize) -> Answer<usize> {
        self.devices.iter().position(|device| device.memory.holds(address)).ok_or(status::INVALID_VALUE)
    }

    /// `cuMemFree` waits for the whole device.
    pub fn free(&mut self, address: usize) -> Answer<()> {
        if address == 0 {
            return Ok(());
        }
        let device = self.owner(address)?;
        self.not_in_capture()?;
        self.wait_for_device(device)?;
        if !self.devices[device].memory.mark_freed(address) {
            return Err(status::INVALID_VALUE);
        }
        self.devices[device].memory.unmap(address);
        self.report_memory(device);
        Ok(())
    }

    pub fn free_on(&mut self, address: usize, stream: usize) -> Answer<()> {
        if address == 0 {
            return Ok(());
        }
        let handle = self.stream(stream)?;
        let device = self.owner(address)?;
        let kind = self.devices[device]
            .memory
            .allocations
            .get(&address)
            .map(|a| a.kind)
            .ok_or(status::INVALID_VALUE)?;
        if let Some(capture) = &mut self.streams.get_mut(&handle).ok_or(status::INVALID_HANDLE)?.capture {
            // A graph frees what it has allocated.
            if kind != Kind::Graph || !capture.allocations.contains(&address) {
                capture.invalid = true;
                return Err(status::INVALID_VALUE);
            }
            return self.push(stream, Item::Unmap(address));
        }
        if !self.devices[device].memory.mark_freed(address) {
            return Err(status::INVALID_VALUE);
        }
        self.push(stream, Item::Unmap(address))
    }

    pub fn memory_info(&self) -> Answer<(usize, usize)> {
        let memory = &self.devices[self.current()?].memory;
        Ok((memory.free_bytes(), memory.capacity))
    }

    pub fn pool(&self, device: i32) -> Answer<usize> {
        Ok(POOL + self.device(device)?)
    }

    pub(super) fn device_of_pool(&mut self, pool: usize) -> Answer<&mut Device> {
        self.devices.get_mut(pool.wrapping_sub(POOL)).ok_or(status::INVALID_VALUE)
    }

    /// Attributes of a pool: release threshold (4), reserved now and at most (5, 6), used now and at most (7, 8).
    pub fn pool_attribute(&mut self, pool: usize, attribute: u32) -> Answer<u64> {
        let device = self.device_of_pool(pool)?;
        match attribute {
            4 => Ok(device.threshold),
            5 | 7 => Ok(device.memory.used_pool as u64),
            6 | 8 => Ok(device.memory.high_pool as u64),
            _ => Err(status::INVALID_VALUE),
        }
    }

    pub fn set_pool_attribute(&mut self, pool: usize, attribute: u32, value: u64) -> Answer<()> {
        let device = self.device_of_pool(pool)?;
        match (attribute, value) {
            (4, threshold) => device.threshold = threshold,
            (6 | 8, 0) => device.memory.high_pool = device.memory.used_pool,
            _ => return Err(status::INVALID_VALUE),
        }
        Ok(())
    }

    /// A pool reserves no more than what is in use.
    pub fn trim_pool(&mut self, pool: usize) -> Answer<()> {
        self.device_of_pool(pool).map(|_| ())
    }

    /// Attributes of the memory of graphs: used now and at most (0, 1), reserved now and at most (2, 3).
    pub fn graph_attribute(&self, device: i32, attribute: u32) -> Answer<u64> {
        let memory = &self.devices[self.device(device)?].memory;
        match attribute {
            0 | 2 => Ok(memory.used_graphs as u64),
            1 | 3 => Ok(memory.high_graphs as u64),
            _ => Err(status::INVALID_VALUE),
        }
    }

    pub fn set_graph_attribute(&mut self, device: i32, attribute: u32, value: u64) -> Answer<()> {
        let index = self.device(device)?;
        let memory = &mut self.devices[index].memory;
        match (attribute, value) {
            (1 | 3, 0) => memory.high_graphs = memory.used_graphs,
            _ => return Err(status::INVALID_VALUE),
        }
        Ok(())
    }

    pub fn allocate_pinned(&mut self, bytes: usize) -> Answer<usize> {
        self.not_in_capture()?;
        let layout =
            std::alloc::Layout::from_size_align(bytes.max(1), 4096).map_err(|_| status::INVALID_VALUE)?;
        // SAFETY: the size is not zero.
        let address = unsafe { std::alloc::alloc(layout) } as usize;
        if address == 0 {
            return Err(status::OUT_OF_MEMORY);
        }
        self.pinned.insert(address, layout.size());
        Ok(address)
    }

    pub fn free_pinned(&mut self, address: usize) -> Answer<()> {
        self.wait_for_current()?;
        let bytes = self.pinned.remove(&address).ok_or(status::INVALID_VALUE)?;
        let layout = std::alloc::Layout::from_size_align(bytes, 4096).map_err(|_| status::INVALID_VALUE)?;
        // SAFETY: allocated with this layout above, and forgotten now.
        unsafe { std::alloc::dealloc(address as *mut u8, layout) };
        Ok(())
    }

    pub(super) fn is_pinned(&self, address: usize) -> bool {
        self.pinned.iter().any(|(start, bytes)| (*start..start + bytes).contains(&address))
    }

    pub(super) fn check_range(&self, address: usize, bytes: usize) -> Answer<()> {
        let device = self.owner(address)?;
        let memory = &self.devices[device].memory;
        // The memory of a graph comes with its launch.
        let of_graph = memory.allocations.range(..=address).next_back().is_some_and(|(start, allocation)| {
            allocation.kind == Kind::Graph && address + bytes <= start + allocation.bytes
        });
        if of_graph || memory.contains(address, bytes) { Ok(()) } else { Err(status::INVALID_VALUE) }
    }

    pub fn copy_to_device(&mut self, to: usize, from: usize, bytes: usize, stream: usize) -> Answer<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.check_range(to, bytes)?;
        let handle = self.stream(stream)?;
        let captured = self.streams[&handle].capture.is_some();
        let run: crate::stream::Run = if captured || self.is_pinned(from) {
            // Read when it happens.
            Arc::new(move || {
                // SAFETY: the target was checked; the source is the caller's, who keeps it until the copy has happened.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
                Ok(())
            })
        } else {
            // SAFETY: the caller has so many bytes there; pageable memory has been read when the call returns.
            let staged = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) }.to_vec();
            Arc::new(move || {
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(staged.as_ptr(), to as *mut u8, bytes) };
                Ok(())
            })
        };
        self.work(stream, Work::new("copy to the device", Demand::of_link(bytes), run))
    }

    pub fn copy_to_host(&mut self, to: usize, from: usize, bytes: usize, stream: usize) -> Answer<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.check_range(from, bytes)?;
        let handle = self.stream(stream)?;
        let captured = self.streams[&handle].capture.is_some();
        let waits = !captured && !self.is_pinned(to);
        if waits {
            // What is in front first: it may wait for another device, and then the copy is asked for again.
            self.run(handle)?;
        }
        let run: crate::stream::Run = Arc::new(move || {
            // SAFETY: the source was checked; the target is the caller's, who keeps it until the copy has happened.
            unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
            Ok(())
        });
        self.work(stream, Work::new("copy to the host", Demand::of_link(bytes), run))?;
        if waits { self.run(handle) } else { Ok(()) }
    }

    pub fn copy_on_device(&mut self, to: usize, from: usize, bytes: usize, stream: usize) -> Answer<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.check_range(to, bytes)?;
        self.check_range(from, bytes)?;
        let run: crate::stream::Run = Arc::new(move || {
            // SAFETY: both were checked.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
            Ok(())
        });
        self.work(stream, Work::new("copy on the device", Demand::of_memory(2 * bytes), run))
    }

    pub fn fill(&mut self, to: usize, value: u8, bytes: usize, stream: usize) -> Answer<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.check_range(to, bytes)?;
        let run: crate::stream::Run = Arc::new(move || {
            // SAFETY: the range was checked.
            unsafe { std::ptr::write_bytes(to as *mut u8, value, bytes) };
            Ok(())
        });
        self.work(stream, Work::new("fill", Demand::of_memory(bytes), run))
    }
}
