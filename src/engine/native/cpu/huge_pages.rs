//! Memory for weights, KV and the bandwidth probe: zeroed, aligned to huge pages where the system gives them, unmapped when dropped.
//!
//! Enters: a number of bytes. Leaves: [`Pages`], which the system allocates on first touch, so that the thread that will read them can touch
//! them first; or a [`Region`] of an [`Arena`], for data smaller than a huge page that is read in order.
#![expect(unsafe_code, reason = "mmap, madvise and typed views of the mapping")]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// The size of a huge page on x86-64 and of the usual one on aarch64.
const HUGE_PAGE: usize = 2 << 20;

/// An anonymous mapping.
#[derive(Debug)]
pub struct Pages {
    mapping: NonNull<u8>,
    mapped: usize,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to this value alone; shared access is through `&`, which only reads.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps zeroed memory.
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        let bytes = bytes
            .max(1)
            .checked_next_multiple_of(4096)
            .filter(|bytes| *bytes < isize::MAX as usize - HUGE_PAGE)
            .ok_or(std::io::ErrorKind::OutOfMemory)?;
        // Small mappings gain nothing from huge pages and would waste most of one.
        let huge = bytes >= HUGE_PAGE;
        let mapped = if huge { bytes + HUGE_PAGE } else { bytes };
        // SAFETY: an anonymous private mapping of a positive size, at an address the system chooses.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        let mapping = NonNull::new(address.cast::<u8>()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        let offset = if huge { mapping.as_ptr().align_offset(HUGE_PAGE) } else { 0 };
        // SAFETY: the offset is below one huge page, by which the mapping is longer than asked for.
        let start = unsafe { mapping.add(offset) };
        #[cfg(target_os = "linux")]
        if huge {
            // SAFETY: the range lies within the mapping. A refusal leaves ordinary pages: slower, not wrong.
            unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Ok(Self { mapping, mapped, start, bytes })
    }

    /// The start of the memory, aligned to at least 4096.
    pub fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// All of the memory as f32, zero until written.
    pub fn floats_mut(&mut self) -> &mut [f32] {
        // SAFETY: page-aligned memory of the mapping, zeroed by the system; `&mut self` makes the slice the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.bytes / size_of::<f32>()) }
    }
}

/// Bytes of a slab of an arena; pages of it that are never touched cost nothing.
const SLAB: usize = 256 << 20;

/// Regions start at a multiple of this: two cache lines, which some processors fetch together.
const REGION_ALIGNMENT: usize = 128;

/// Allocates neighbouring regions of large mappings, in the order of the calls.
///
/// The matrices of a small model are smaller than a huge page, and each in a mapping of its own would lie in ordinary pages, whose
/// translations cost more time than the bytes.
#[derive(Debug, Default)]
pub struct Arena {
    slab: Option<Arc<Pages>>,
    used: usize,
}

impl Arena {
    /// The next region of so many zeroed bytes.
    pub fn take(&mut self, bytes: usize) -> std::io::Result<Region> {
        let end = self.used.next_multiple_of(REGION_ALIGNMENT) + bytes;
        let slab = match &self.slab {
            Some(slab) if end <= slab.bytes => Arc::clone(slab),
            _ => {
                let slab = Arc::new(Pages::new(bytes.max(SLAB))?);
                self.slab = Some(Arc::clone(&slab));
                self.used = 0;
                slab
            }
        };
        let start = self.used.next_multiple_of(REGION_ALIGNMENT);
        self.used = start + bytes;
        Ok(Region { slab, range: start..self.used })
    }
}

/// A part of a slab with one owner.
#[derive(Debug)]
pub struct Region {
    slab: Arc<Pages>,
    range: Range<usize>,
}

impl Region {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: within the slab, which lives as long as the region; only `bytes_mut` of this region writes here.
        unsafe { std::slice::from_raw_parts(self.slab.as_ptr().add(self.range.start), self.range.len()) }
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: regions of a slab do not overlap, and this one is exclusively borrowed.
        unsafe {
            let start = self.slab.start.as_ptr().add(self.range.start);
            std::slice::from_raw_parts_mut(start, self.range.len())
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: exactly what was mapped, and nothing borrows it any more.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_of_an_arena_are_neighbours_and_do_not_overlap() {
        let mut arena = Arena::default();
        let mut regions: Vec<Region> =
            [1, 200, 4096, SLAB, 7].iter().map(|bytes| arena.take(*bytes).unwrap()).collect();
        for (value, region) in regions.iter_mut().enumerate().filter(|(_, region)| region.range.len() < SLAB)
        {
            region.bytes_mut().fill(u8::try_from(value).unwrap() + 1);
        }
        assert!(Arc::ptr_eq(&regions[0].slab, &regions[2].slab));
        assert_eq!(regions[1].bytes().as_ptr() as usize - regions[0].bytes().as_ptr() as usize, 128);
        assert!(regions[1].bytes().iter().all(|b| *b == 2) && regions[1].bytes().len() == 200);
        assert!(regions[2].bytes().iter().all(|b| *b == 3));
        assert!(
            regions[3].bytes()[..4096].iter().all(|b| *b == 0),
            "what is larger than a slab gets its own"
        );
    }

    #[test]
    fn pages_are_zero_aligned_and_writable_to_the_last_byte() {
        for bytes in [1, 5000, HUGE_PAGE, SLAB + HUGE_PAGE + 1] {
            let alignment = if bytes >= HUGE_PAGE { HUGE_PAGE } else { 4096 };
            assert_eq!(Pages::new(bytes).unwrap().as_ptr().align_offset(alignment), 0);
            let mut region = Arena::default().take(bytes).unwrap();
            assert!(region.bytes().iter().all(|b| *b == 0));
            *region.bytes_mut().last_mut().unwrap() = 7;
            assert_eq!(region.bytes().last(), Some(&7));
            let mut pages = Pages::new(bytes).unwrap();
            pages.floats_mut().fill(1.0);
            assert_eq!(pages.floats_mut().len(), bytes.next_multiple_of(4096) / 4);
        }
        assert!(Pages::new(usize::MAX).is_err());
    }
}
