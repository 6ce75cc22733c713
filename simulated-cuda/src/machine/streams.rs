//! Streams and events: what runs, and in which order.
//!
//! Enters: work. Leaves: the same done, when somebody waits, behind the work of its stream and the events that the stream waits for.

use super::*;

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
        let stream =
            Stream { device, blocking: flags == 0, queue: VecDeque::new(), capture: None, running: false };
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
        entry.queue.push_back(item);
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

    /// Runs a stream's work to its end.
    pub(super) fn run(&mut self, stream: usize) -> Answer<()> {
        self.run_until(stream, None)
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
            let device = entry.device;
            let Some(item) = entry.queue.pop_front() else { return Ok(()) };
            entry.running = true;
            let next = entry.queue.front().cloned();
            let done = matches!(item, Item::Record { ticket: number, .. } if Some(number) == ticket);
            let ran = self.perform(device, &item, next.as_ref());
            if let Some(entry) = self.streams.get_mut(&stream) {
                entry.running = false;
            }
            ran?;
            if done {
                return Ok(());
            }
        }
    }

    pub(super) fn perform(&mut self, device: usize, item: &Item, next: Option<&Item>) -> Answer<()> {
        match item {
            Item::Work(work) => self.perform_work(work, next)?,
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
                if let Some(event) = self.events.get_mut(event) {
                    event.done = event.done.max(*ticket);
                    event.at = Some(Instant::now());
                }
            }
            Item::Wait { event, ticket } => {
                let before =
                    self.events.get(event).filter(|event| event.done < *ticket).and_then(|event| event.last);
                if let Some((stream, _)) = before {
                    self.run_until(stream, Some(*ticket))?;
                }
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
                    self.perform(device, node, nodes.get(at + 1))?;
                }
            }
        }
        self.report_memory(device);
        if self.sticky == SUCCESS { Ok(()) } else { Err(self.sticky) }
    }

    /// Runs work to its end. A kernel whose launch allows that is begun before the one in front of it has run, so that it sees nothing of its
    /// results unless it waits.
    pub(super) fn perform_work(&mut self, work: &Work, next: Option<&Item>) -> Answer<()> {
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
        let this = self.begun.take();
        let early = match next {
            Some(Item::Work(next)) if work.module.is_some() => next.early.as_ref(),
            _ => None,
        };
        if let Some(early) = early {
            // Another slot than this one's; what was not begun early runs in the first.
            self.slot = if this.is_some() { self.slot ^ 1 } else { 1 };
            match early(self.slot) {
                Ok(begun) => self.begun = Some(begun),
                Err(text) => return Err(self.kernel_failed(work, &text)),
            }
        }
        let ran = match this {
            Some(Some(finish)) => finish(),
            Some(None) => Ok(()),
            None => (work.run)(),
        };
        let slowness = self.script.slowness(&work.name);
        if slowness > 1.0 {
            std::thread::sleep(began.elapsed().mul_f64(slowness - 1.0));
        }
        ran.map_err(|text| self.kernel_failed(work, &text))
    }

    pub(super) fn kernel_failed(&mut self, work: &Work, text: &str) -> i32 {
        let status =
            if text.contains("illegal address") { status::ILLEGAL_ADDRESS } else { status::LAUNCH_FAILED };
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
                self.run_until(stream, Some(ticket))
            }
            _ => Ok(()),
        }
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
        let seconds = if to >= from { (to - from).as_secs_f64() } else { -(from - to).as_secs_f64() };
        Ok((seconds * 1e3) as f32)
    }
}
