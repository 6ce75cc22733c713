//! Streams and events: what runs, and in which order.
//!
//! Enters: work. Leaves: the same done, when somebody waits, behind the work of its stream and the events that the stream waits for.

use super::*;
use crate::kernels;

/// How a stream has come further.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Advance {
    Done,
    Recorded(u64),
    /// It has not: its kernel waits for another device.
    Waits,
    /// It has no work.
    Nothing,
}

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
            flight: None,
            begun: None,
            slot: 0,
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
        if drained != Err(WAITS_FOR_DEVICE) {
            self.streams.remove(&stream);
        }
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
        entry.queue.push_back(Queued { item, put_at: now, gap: Gap::Launch });
        if entry.queue.len() <= LONGEST_QUEUE {
            return Ok(());
        }
        match self.run(handle) {
            // It is there, and runs when somebody waits.
            Err(WAITS_FOR_DEVICE) => Ok(()),
            ran => ran,
        }
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

    /// Waits for the device of this thread's context, or for all where it has none.
    pub(super) fn wait_for_current(&mut self) -> Answer<()> {
        match self.current() {
            Ok(device) => self.wait_for_device(device),
            Err(_) => (0..self.devices.len()).try_for_each(|device| self.wait_for_device(device)),
        }
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
            match self.advance(stream)? {
                Advance::Nothing => return Ok(()),
                Advance::Recorded(number) if Some(number) == ticket => return Ok(()),
                Advance::Waits if !self.advance_others(stream)? => return Err(WAITS_FOR_DEVICE),
                _ => {}
            }
        }
    }

    /// Advances the streams of other devices by one piece of work each; whether one has come further.
    fn advance_others(&mut self, stream: usize) -> Answer<bool> {
        let device = self.stream_mut(stream)?.device;
        let others: Vec<usize> = self
            .streams
            .iter()
            .filter(|(_, other)| other.device != device)
            .map(|(handle, _)| *handle)
            .collect();
        let mut further = false;
        for other in others {
            match self.advance(other) {
                Ok(advance) => further |= !matches!(advance, Advance::Nothing | Advance::Waits),
                Err(WAITS_FOR_DEVICE) => {}
                Err(status) => return Err(status),
            }
        }
        Ok(further)
    }

    /// Does the next piece of a stream's work, or runs on what has begun.
    fn advance(&mut self, stream: usize) -> Answer<Advance> {
        if self.sticky != SUCCESS {
            return Err(self.sticky);
        }
        let Some(entry) = self.streams.get_mut(&stream) else { return Ok(Advance::Nothing) };
        if entry.running {
            // Two streams that wait for each other: no such order can be asked for.
            return Ok(Advance::Nothing);
        }
        entry.running = true;
        let done = self.advance_running(stream);
        if let Some(entry) = self.streams.get_mut(&stream) {
            entry.running = false;
            let device = entry.device;
            self.report_memory(device);
        }
        if self.sticky == SUCCESS { done } else { Err(self.sticky) }
    }

    fn stream_mut(&mut self, stream: usize) -> Answer<&mut Stream> {
        self.streams.get_mut(&stream).ok_or(status::INVALID_HANDLE)
    }

    fn advance_running(&mut self, stream: usize) -> Answer<Advance> {
        let entry = self.stream_mut(stream)?;
        if let Some(flight) = entry.flight.take() {
            return self.run_on(stream, flight, Advance::Waits);
        }
        let device = entry.device;
        let Some(Queued { item, put_at, gap }) = entry.queue.pop_front() else { return Ok(Advance::Nothing) };
        entry.done_at = entry.done_at.max(put_at);
        match item {
            Item::Work(work) => {
                let next = entry.queue.front().filter(|next| next.gap == gap);
                let next = next.and_then(|next| match &next.item {
                    Item::Work(next) if next.dependent && work.module.is_some() => Some(next.clone()),
                    _ => None,
                });
                return self.begin(stream, work, next, gap);
            }
            Item::Unmap(address) => self.devices[device].memory.unmap(address),
            Item::Map(address) => {
                if !self.devices[device].memory.map_of_graph(address) {
                    self.stick(
                        status::OUT_OF_MEMORY,
                        "a graph has no room for its allocations, or was launched again with some not freed",
                    );
                }
            }
            Item::Record { event, ticket } => {
                let at = entry.done_at;
                if let Some(event) = self.events.get_mut(&event) {
                    event.done = event.done.max(ticket);
                    event.at = Some(at);
                }
                return Ok(Advance::Recorded(ticket));
            }
            Item::Wait { event, ticket } => {
                let before =
                    self.events.get(&event).filter(|event| event.done < ticket).and_then(|event| event.last);
                if let Some((other, _)) = before {
                    let waited = self.run_until(other, Some(ticket));
                    if waited.is_err() {
                        self.stream_mut(stream)?.queue.push_front(Queued { item, put_at, gap });
                        return waited.map(|()| Advance::Nothing);
                    }
                }
                let at = self.events.get(&event).and_then(|event| event.at).unwrap_or_default();
                let waiting = self.stream_mut(stream)?;
                waiting.done_at = waiting.done_at.max(at);
            }
            Item::Graph { nodes, frees_first } => {
                for node in nodes.iter().rev() {
                    let item = node.clone();
                    entry.queue.push_front(Queued { item, put_at, gap: Gap::Node });
                }
                for node in nodes.iter().filter(|_| frees_first) {
                    if let Item::Map(address) = node {
                        self.devices[device].memory.unmap(*address);
                    }
                }
            }
        }
        Ok(Advance::Done)
    }

    /// Begins work. A kernel whose launch allows that is begun before the one in front of it has run, so that it sees nothing of its results unless it
    /// waits.
    fn begin(&mut self, stream: usize, work: Work, next: Option<Work>, gap: Gap) -> Answer<Advance> {
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
        let entry = self.stream_mut(stream)?;
        let first = 2 * entry.device as u32;
        let this = entry.begun.take();
        let slot = if this.is_some() { entry.slot } else { first };
        if let Some(next) = next {
            // Another slot than this one's; what was not begun early runs in the first.
            let of_next = if this.is_some() { slot ^ 1 } else { first + 1 };
            entry.slot = of_next;
            self.watch(stream, of_next)?;
            let begun = next.begin.as_ref().map_or(Ok(None), |begin| begin(of_next, false));
            match begun {
                Ok(begun) => self.stream_mut(stream)?.begun = Some(begun),
                Err(text) => return Err(self.kernel_failed(&next, &text)),
            }
        }
        self.watch(stream, slot)?;
        let (gap, left) = match (this, &work.begin) {
            (Some(left), _) => (Gap::Dependent, Ok(left)),
            (None, Some(begin)) => (gap, begin(slot, true)),
            (None, None) => (gap, (work.run)().map(|()| None)),
        };
        match left {
            Err(text) => Err(self.kernel_failed(&work, &text)),
            Ok(Some(finish)) => {
                let flight = Flight { work, finish, gap, slot, spent: began.elapsed() };
                self.run_on(stream, flight, Advance::Done)
            }
            Ok(None) => self.end(stream, &work, gap, slot, began.elapsed()),
        }
    }

    /// Counts what a kernel touches that runs in a slot.
    fn watch(&mut self, stream: usize, slot: u32) -> Answer<()> {
        let device = self.stream_mut(stream)?.device;
        kernels::watch(device, self.devices[device].peers, slot);
        Ok(())
    }

    /// Runs on a kernel that has begun; what to say where it has not ended.
    fn run_on(&mut self, stream: usize, mut flight: Flight, waits: Advance) -> Answer<Advance> {
        let began = Instant::now();
        self.watch(stream, flight.slot)?;
        let ended = (flight.finish)().map_err(|text| self.kernel_failed(&flight.work, &text))?;
        flight.spent += began.elapsed();
        if ended {
            return self.end(stream, &flight.work, flight.gap, flight.slot, flight.spent);
        }
        let entry = self.stream_mut(stream)?;
        let (device, at) = (entry.device, entry.done_at);
        entry.flight = Some(flight);
        self.comes_to_meeting(device, at);
        Ok(waits)
    }

    /// Notes when a device comes to its next meeting with others; when the last of those comes that are there.
    fn comes_to_meeting(&mut self, device: usize, at: f64) -> f64 {
        let number = self.devices[device].met;
        if self.meetings.len() <= number {
            self.meetings.resize(number + 1, 0.0);
        }
        self.meetings[number] = self.meetings[number].max(at);
        self.meetings[number]
    }

    /// Work is at its end: when, by the device's time.
    fn end(&mut self, stream: usize, work: &Work, gap: Gap, slot: u32, spent: Duration) -> Answer<Advance> {
        let mut demand = work.demand.and(kernels::demand(slot));
        if demand.meets {
            // It looks at the clock for how long it has waited: not what it would take.
            demand.clock_ns = 0;
        }
        let seconds = self.clock.cost(self.script, &work.name, &demand, gap);
        let entry = self.stream_mut(stream)?;
        let (device, mut from) = (entry.device, entry.done_at);
        if demand.meets {
            from = self.comes_to_meeting(device, from);
            self.devices[device].met += 1;
        }
        let done_at = self.clock.simulated(spent, from + seconds);
        self.stream_mut(stream)?.done_at = done_at;
        Ok(Advance::Done)
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
