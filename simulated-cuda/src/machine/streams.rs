//! Streams and events: what runs, and in which order.
//!
//! Enters: work. Leaves: the same done, when somebody waits, behind the work of its stream and the events that the stream waits for.

use super::*;
use crate::kernels;

impl Machine {
    /// A handle of the table, for the default stream that of the current device.
    pub(super) fn stream(&self, stream: usize) -> Answer<usize> {
        // The null stream, and the legacy default stream by its number.
        if stream <= 1 {
            return Ok(DEFAULT_STREAM + self.current()?);
        }
        let found = self.streams.get(&stream).ok_or(status::INVALID_HANDLE)?;
        if found.device == self.current()? { Ok(stream) } else { Err(status::INVALID_HANDLE) }
    }

    pub fn create_stream(&mut self, flags: u32) -> Answer<usize> {
        if flags > 1 {
            return Err(status::INVALID_VALUE);
        }
        let device = self.current()?;
        let handle = self.handle();
        let stream = Stream {
            device,
            blocking: flags == 0,
            queue: VecDeque::new(),
            done_at: 0.0,
            capture: None,
            running: false,
        };
        self.streams.insert(handle, stream);
        Ok(handle)
    }

    pub fn destroy_stream(&mut self, stream: usize) -> Answer<()> {
        if !self.streams.contains_key(&stream) || stream < 0x6000_0000 {
            return Err(status::INVALID_HANDLE);
        }
        // CUDA returns at once and frees the stream when its work is done.
        let drained = self.run(stream);
        self.streams.remove(&stream);
        drained
    }

    pub(super) fn push(&mut self, stream: usize, item: Item) -> Answer<()> {
        let now = self.clock.host();
        let handle = self.stream(stream)?;
        let device = self.streams[&handle].device;
        let default = DEFAULT_STREAM + device;
        // The default stream and blocking ones wait for each other.
        if handle == default {
            let others: Vec<usize> = self
                .streams
                .iter()
                .filter(|(_, s)| s.device == device && s.blocking && s.capture.is_none())
                .map(|(h, _)| *h)
                .collect();
            for other in others {
                if other != default {
                    self.run(other)?;
                }
            }
        } else if self.streams[&handle].blocking && !self.streams[&default].queue.is_empty() {
            self.run(default)?;
        }
        let entry = self.streams.get_mut(&handle).ok_or(status::INVALID_HANDLE)?;
        if let Some(capture) = &mut entry.capture {
            if capture.invalid {
                return Err(status::STREAM_CAPTURE_INVALIDATED);
            }
            capture.nodes.push(item);
            return Ok(());
        }
        entry.queue.push_back((item, now));
        if entry.queue.len() > LONGEST_QUEUE { self.run(handle) } else { Ok(()) }
    }

    /// Puts work on a stream.
    ///
    /// # Errors
    /// As the driver says.
    pub fn work(&mut self, stream: usize, work: Work) -> Answer<()> {
        self.push(stream, Item::Work(work))
    }

    pub fn synchronise_stream(&mut self, stream: usize) -> Answer<()> {
        let handle = self.stream(stream)?;
        if let Some(capture) = self.streams.get_mut(&handle).and_then(|stream| stream.capture.as_mut()) {
            capture.invalid = true;
            return Err(status::STREAM_CAPTURE_UNSUPPORTED);
        }
        self.not_in_capture()?;
        self.run(handle)
    }

    pub fn synchronise_context(&mut self) -> Answer<()> {
        let device = self.current()?;
        self.not_in_capture()?;
        self.wait_for_device(device)
    }

    pub(super) fn wait_for_device(&mut self, device: usize) -> Answer<()> {
        let streams: Vec<usize> = self
            .streams
            .iter()
            .filter(|(_, stream)| stream.device == device)
            .map(|(handle, _)| *handle)
            .collect();
        streams.into_iter().try_for_each(|handle| self.run(handle))
    }

    pub(super) fn wait_for_all(&mut self) -> Answer<()> {
        (0..self.devices.len()).try_for_each(|device| self.wait_for_device(device))
    }

    /// Runs a stream's work to its end. The host has waited until then.
    pub(super) fn run(&mut self, stream: usize) -> Answer<()> {
        self.run_until(stream, None)?;
        if let Some(stream) = self.streams.get(&stream) {
            self.clock.wait_until(stream.done_at);
        }
        Ok(())
    }

    pub(super) fn run_until(&mut self, stream: usize, ticket: Option<u64>) -> Answer<()> {
        loop {
            if self.sticky != SUCCESS {
                return Err(self.sticky);
            }
            let Some(entry) = self.streams.get_mut(&stream) else { return Ok(()) };
            if entry.running {
                // Two streams that wait for each other: no such order can be asked for.
                return Ok(());
            }
            let Some((item, put_at)) = entry.queue.pop_front() else { return Ok(()) };
            entry.running = true;
            entry.done_at = entry.done_at.max(put_at);
            let next = entry.queue.front().map(|(next, _)| next.clone());
            let done = matches!(item, Item::Record { ticket: number, .. } if Some(number) == ticket);
            let ran = self.perform(stream, &item, next.as_ref(), Gap::Launch);
            if let Some(entry) = self.streams.get_mut(&stream) {
                entry.running = false;
            }
            ran?;
            if done {
                return Ok(());
            }
        }
    }

    fn stream_mut(&mut self, stream: usize) -> Answer<&mut Stream> {
        self.streams.get_mut(&stream).ok_or(status::INVALID_HANDLE)
    }

    fn perform(&mut self, stream: usize, item: &Item, next: Option<&Item>, gap: Gap) -> Answer<()> {
        let device = self.stream_mut(stream)?.device;
        match item {
            Item::Work(work) => self.perform_work(stream, work, next, gap)?,
            Item::Unmap(address) => self.devices[device].memory.unmap(*address),
            Item::Map(address) => {
                if !self.devices[device].memory.map_of_graph(*address) {
                    self.stick(
                        status::OUT_OF_MEMORY,
                        "a graph has no room for its allocations, or was launched again with some not freed",
                    );
                }
            }
            Item::Record { event, ticket } => {
                let at = self.stream_mut(stream)?.done_at;
                if let Some(event) = self.events.get_mut(event) {
                    event.done = event.done.max(*ticket);
                    event.at = Some(at);
                }
            }
            Item::Wait { event, ticket } => {
                let before =
                    self.events.get(event).filter(|event| event.done < *ticket).and_then(|event| event.last);
                if let Some((other, _)) = before {
                    self.run_until(other, Some(*ticket))?;
                }
                let at = self.events.get(event).and_then(|event| event.at).unwrap_or_default();
                let waiting = self.stream_mut(stream)?;
                waiting.done_at = waiting.done_at.max(at);
            }
            Item::Graph { nodes, frees_first } => {
                if *frees_first {
                    for node in nodes.iter() {
                        if let Item::Map(address) = node {
                            self.devices[device].memory.unmap(*address);
                        }
                    }
                }
                for (at, node) in nodes.iter().enumerate() {
                    self.perform(stream, node, nodes.get(at + 1), Gap::Node)?;
                }
            }
        }
        self.report_memory(device);
        if self.sticky == SUCCESS { Ok(()) } else { Err(self.sticky) }
    }

    /// Runs work to its end. A kernel whose launch allows that is begun before the one in front of it has run, so that it sees nothing of its
    /// results unless it waits.
    fn perform_work(&mut self, stream: usize, work: &Work, next: Option<&Item>, gap: Gap) -> Answer<()> {
        self.launches += u64::from(work.module.is_some());
        let number = self.launches;
        if work.module.is_some() && self.script.hang == Some(number) {
            eprintln!("simulated CUDA device: {} hangs", work.name);
            loop {
                std::thread::park();
            }
        }
        if work.module.is_some() && self.script.illegal_address == Some(number) {
            self.stick(status::ILLEGAL_ADDRESS, &format!("{}: a planted illegal address", work.name));
            return Err(self.sticky);
        }
        let began = Instant::now();
        let device = self.stream_mut(stream)?.device;
        let (base, bytes) = self.devices[device].memory.addresses();
        let this = self.begun.take();
        let slot = if this.is_some() { self.slot } else { 0 };
        let early = match next {
            Some(Item::Work(next)) if work.module.is_some() => next.early.as_ref().map(|early| (next, early)),
            _ => None,
        };
        if let Some((next, early)) = early {
            // Another slot than this one's; what was not begun early runs in the first.
            self.slot = if this.is_some() { self.slot ^ 1 } else { 1 };
            kernels::watch(base, bytes, self.slot);
            match early(self.slot) {
                Ok(begun) => self.begun = Some(begun),
                Err(text) => return Err(self.kernel_failed(next, &text)),
            }
        }
        let overlapped = this.is_some();
        kernels::watch(base, bytes, slot);
        let ran = match this {
            Some(Some(finish)) => finish(),
            Some(None) => Ok(()),
            None => (work.run)(),
        };
        let demand = work.demand.and(kernels::demand(slot));
        let gap = if overlapped { Gap::Dependent } else { gap };
        let seconds = self.clock.cost(self.script, &work.name, &demand, gap);
        let done_at = self.stream_mut(stream)?.done_at + seconds;
        self.stream_mut(stream)?.done_at = self.clock.simulated(began.elapsed(), done_at);
        ran.map_err(|text| self.kernel_failed(work, &text))
    }

    pub(super) fn kernel_failed(&mut self, work: &Work, text: &str) -> i32 {
        let status = if text.contains("illegal address") {
            status::ILLEGAL_ADDRESS
        } else if text.contains("misaligned address") {
            status::MISALIGNED_ADDRESS
        } else {
            status::LAUNCH_FAILED
        };
        self.stick(status, &format!("{}: {text}", work.name));
        self.sticky
    }

    pub fn create_event(&mut self, flags: u32) -> Answer<usize> {
        let device = self.current()?;
        // Blocking waits (1), no time (2), between processes (4).
        if flags > 7 {
            return Err(status::INVALID_VALUE);
        }
        let handle = self.handle();
        self.events.insert(handle, Event { device, timed: flags & 2 == 0, ..Event::default() });
        Ok(handle)
    }

    pub fn destroy_event(&mut self, event: usize) -> Answer<()> {
        self.events.remove(&event).map(|_| ()).ok_or(status::INVALID_HANDLE)
    }

    pub fn record(&mut self, event: usize, stream: usize) -> Answer<()> {
        let handle = self.stream(stream)?;
        let ticket = self.ticket();
        let captured = self.streams[&handle].capture.is_some();
        let device = self.streams[&handle].device;
        let found = self.events.get_mut(&event).ok_or(status::INVALID_HANDLE)?;
        if found.device != device {
            return Err(status::INVALID_HANDLE);
        }
        found.captured = captured;
        if captured {
            // An edge of the graph: the event itself is never recorded.
            return Ok(());
        }
        found.last = Some((handle, ticket));
        self.push(stream, Item::Record { event, ticket })
    }

    pub fn wait(&mut self, stream: usize, event: usize) -> Answer<()> {
        let found = self.events.get(&event).ok_or(status::INVALID_HANDLE)?;
        let (captured, last) = (found.captured, found.last);
        let handle = self.stream(stream)?;
        if let Some(capture) = &mut self.streams.get_mut(&handle).ok_or(status::INVALID_HANDLE)?.capture {
            if captured {
                return Ok(());
            }
            // Work from outside of a capture can't be waited for in it.
            capture.invalid = true;
            return Err(905);
        }
        match last {
            Some((_, ticket)) => self.push(stream, Item::Wait { event, ticket }),
            None => Ok(()),
        }
    }

    pub fn synchronise_event(&mut self, event: usize) -> Answer<()> {
        let found = self.events.get(&event).ok_or(status::INVALID_HANDLE)?;
        if found.captured {
            return Err(status::STREAM_CAPTURE_UNSUPPORTED);
        }
        let last = found.last;
        self.not_in_capture()?;
        match last {
            Some((stream, ticket)) if self.events[&event].done < ticket => {
                self.run_until(stream, Some(ticket))?;
            }
            _ => {}
        }
        if let Some(at) = self.events[&event].at {
            self.clock.wait_until(at);
        }
        Ok(())
    }

    pub fn elapsed_ms(&self, start: usize, end: usize) -> Answer<f32> {
        let find = |event| self.events.get(&event).ok_or(status::INVALID_HANDLE);
        let (start, end) = (find(start)?, find(end)?);
        for event in [start, end] {
            let (_, ticket) =
                event.last.filter(|_| event.timed && !event.captured).ok_or(status::INVALID_HANDLE)?;
            if event.done < ticket {
                return Err(status::NOT_READY);
            }
        }
        let (Some(from), Some(to)) = (start.at, end.at) else { return Err(status::INVALID_HANDLE) };
        Ok(((to - from) * 1e3) as f32)
    }
}
