//! Modules, functions and launches.
//!
//! Enters: names of kernels and the addresses of their arguments. Leaves: work of a stream with the arguments as they are at the call.

use super::*;

impl Machine {
    pub fn load(&mut self) -> Answer<usize> {
        let device = self.current()?;
        let handle = self.handle();
        self.modules.insert(handle, device);
        Ok(handle)
    }

    pub fn unload(&mut self, module: usize) -> Answer<()> {
        self.modules.remove(&module).ok_or(status::INVALID_HANDLE)?;
        self.functions.retain(|_, function| function.module != module);
        Ok(())
    }

    pub fn function(&mut self, module: usize, name: &str) -> Answer<usize> {
        if !self.modules.contains_key(&module) {
            return Err(status::INVALID_HANDLE);
        }
        let symbol = std::ffi::CString::new(name).map_err(|_| status::INVALID_VALUE)?;
        if crate::kernels::parameters(&symbol).is_none() {
            eprintln!("simulated CUDA device: there is no kernel {name}");
            return Err(status::NOT_FOUND);
        }
        let handle = self.handle();
        self.functions.insert(
            handle,
            Function { module, name: name.into(), shared_limit: crate::launch::SHARED_BYTES },
        );
        Ok(handle)
    }

    /// Raises what a launch may ask for of dynamic shared memory (attribute 8).
    pub fn set_function_attribute(&mut self, function: usize, attribute: u32, value: i32) -> Answer<()> {
        let most =
            self.script.limits().shared_bytes_per_block_opt_in as usize - crate::launch::STATIC_SHARED_BYTES;
        let found = self.functions.get_mut(&function).ok_or(status::INVALID_HANDLE)?;
        match (attribute, usize::try_from(value)) {
            (8, Ok(bytes)) if bytes <= most => found.shared_limit = bytes,
            // Preferred carve-out of shared memory.
            (9, _) => {}
            _ => return Err(status::INVALID_VALUE),
        }
        Ok(())
    }

    /// Static shared memory (attribute 1), PTX that the kernel was compiled from (5), dynamic shared memory that a launch may have (8).
    pub fn function_attribute(&self, function: usize, attribute: u32) -> Answer<i32> {
        let found = self.functions.get(&function).ok_or(status::INVALID_HANDLE)?;
        match attribute {
            1 => i32::try_from(crate::launch::STATIC_SHARED_BYTES),
            5 => Ok(self.script.ptx_version()),
            8 => i32::try_from(found.shared_limit),
            _ => return Err(status::INVALID_VALUE),
        }
        .map_err(|_| status::INVALID_VALUE)
    }

    /// Launches a kernel.
    ///
    /// # Safety
    ///
    /// `arguments` holds an address for each of the kernel's parameters.
    ///
    /// # Errors
    /// As the driver says.
    #[expect(clippy::too_many_arguments, reason = "those of the driver's call")]
    pub unsafe fn launch(
        &mut self,
        function: usize,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: usize,
        stream: usize,
        arguments: *const *mut c_void,
        dependent: bool,
    ) -> Answer<()> {
        let found = self.functions.get(&function).ok_or(status::INVALID_HANDLE)?;
        let config = crate::launch::Config { grid, block, shared_bytes, shared_limit: found.shared_limit };
        let module = found.module;
        // SAFETY: the caller's promise.
        let mut work = unsafe {
            crate::launch::work(&found.name, &config, arguments, dependent && !self.script.late_dependents)
        }?;
        work.module = Some(module);
        self.work(stream, work)
    }
}
