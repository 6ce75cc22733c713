//! Captures, and graphs of what was captured.
//!
//! Enters: the work of a stream between the beginning and the end of a capture. Leaves: a graph, and what a launch of it puts on a stream. What CUDA
//! refuses in a capture is refused, and voids it.

use super::*;

impl Machine {
    /// Refuses what may not be called while this thread captures; the capture is void then.
    pub(super) fn not_in_capture(&mut self) -> Answer<()> {
        let thread = std::thread::current().id();
        let mut refused = false;
        for capture in self.streams.values_mut().filter_map(|stream| stream.capture.as_mut()) {
            if capture.thread_local && capture.thread == thread {
                capture.invalid = true;
                refused = true;
            }
        }
        if refused { Err(status::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    pub fn begin_capture(&mut self, stream: usize, mode: u32) -> Answer<()> {
        if stream == 0 {
            return Err(status::STREAM_CAPTURE_UNSUPPORTED);
        }
        let stream = self.streams.get_mut(&stream).ok_or(status::INVALID_HANDLE)?;
        if mode > 2 || stream.capture.is_some() {
            return Err(status::INVALID_VALUE);
        }
        stream.capture = Some(Capture {
            nodes: Vec::new(),
            thread: std::thread::current().id(),
            // A global capture refuses for all threads; the program has one.
            thread_local: mode != 2,
            invalid: false,
            allocations: Vec::new(),
        });
        Ok(())
    }

    pub fn end_capture(&mut self, stream: usize) -> Answer<usize> {
        let stream = self.streams.get_mut(&stream).ok_or(status::INVALID_HANDLE)?;
        let thread = stream.capture.as_ref().ok_or(status::INVALID_VALUE)?;
        if thread.thread_local && thread.thread != std::thread::current().id() {
            return Err(status::STREAM_CAPTURE_WRONG_THREAD);
        }
        let device = stream.device;
        let capture = stream.capture.take().ok_or(status::INVALID_VALUE)?;
        if capture.invalid {
            for address in capture.allocations {
                self.devices[device].memory.forget(address);
            }
            return Err(status::STREAM_CAPTURE_INVALIDATED);
        }
        let mut modules: Vec<usize> = capture
            .nodes
            .iter()
            .filter_map(|node| match node {
                Item::Work(work) => work.module,
                _ => None,
            })
            .collect();
        modules.sort_unstable();
        modules.dedup();
        let handle = self.handle();
        let graph = Graph {
            nodes: Arc::new(capture.nodes),
            modules,
            allocations: capture.allocations,
            executables: 0,
            destroyed: false,
        };
        self.graphs.insert(handle, graph);
        Ok(handle)
    }

    /// 0 not captured, 1 captured, 2 captured and void.
    pub fn capture_status(&self, stream: usize) -> Answer<u32> {
        let stream = self.stream(stream)?;
        Ok(self.streams[&stream].capture.as_ref().map_or(0, |capture| if capture.invalid { 2 } else { 1 }))
    }

    pub fn instantiate(&mut self, graph: usize, flags: u64) -> Answer<usize> {
        let found =
            self.graphs.get_mut(&graph).filter(|graph| !graph.destroyed).ok_or(status::INVALID_VALUE)?;
        // Free allocations before a launch (1), upload (2), launch from the device (4), the priorities of nodes (8).
        if flags > 15 {
            return Err(status::INVALID_VALUE);
        }
        found.executables += 1;
        let executable = Executable {
            graph,
            nodes: found.nodes.clone(),
            modules: found.modules.clone(),
            frees_first: flags & 1 != 0,
        };
        let handle = self.handle();
        self.executables.insert(handle, executable);
        Ok(handle)
    }

    pub(super) fn executable(&self, handle: usize) -> Answer<&Executable> {
        let executable = self.executables.get(&handle).ok_or(status::INVALID_VALUE)?;
        if executable.modules.iter().all(|module| self.modules.contains_key(module)) {
            return Ok(executable);
        }
        eprintln!("simulated CUDA device: a graph's kernels were unloaded before it");
        Err(status::INVALID_HANDLE)
    }

    pub fn upload(&mut self, executable: usize, stream: usize) -> Answer<()> {
        self.stream(stream)?;
        self.executable(executable).map(|_| ())
    }

    pub fn launch_graph(&mut self, executable: usize, stream: usize) -> Answer<()> {
        let executable = self.executable(executable)?;
        let item = Item::Graph { nodes: executable.nodes.clone(), frees_first: executable.frees_first };
        self.push(stream, item)
    }

    pub fn destroy_graph(&mut self, graph: usize) -> Answer<()> {
        let found =
            self.graphs.get_mut(&graph).filter(|graph| !graph.destroyed).ok_or(status::INVALID_VALUE)?;
        found.destroyed = true;
        self.forget_graph(graph);
        Ok(())
    }

    pub fn destroy_executable(&mut self, executable: usize) -> Answer<()> {
        let stale = matches!(self.executable(executable), Err(status::INVALID_HANDLE));
        // A launch that has not run yet runs first.
        self.wait_for_current()?;
        let gone = self.executables.remove(&executable).ok_or(status::INVALID_VALUE)?;
        if let Some(graph) = self.graphs.get_mut(&gone.graph) {
            graph.executables -= 1;
        }
        self.forget_graph(gone.graph);
        if stale { Err(status::INVALID_HANDLE) } else { Ok(()) }
    }

    pub(super) fn forget_graph(&mut self, handle: usize) {
        if !self.graphs.get(&handle).is_some_and(|graph| graph.destroyed && graph.executables == 0) {
            return;
        }
        let Some(graph) = self.graphs.remove(&handle) else { return };
        for address in graph.allocations {
            for device in &mut self.devices {
                device.memory.forget(address);
            }
        }
    }
}
