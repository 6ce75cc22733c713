//! What is simulated and which faults are planted.
//!
//! Enters: the environment variable `HBMARK_SIMULATED_CUDA`, such as `device=h100,count=2,out-of-memory=120`. Leaves: [`Script`]. A text
//! that cannot be read ends the process: a test would else pass without its fault.
//!
//! | part | meaning |
//! |---|---|
//! | `device=h100` | the product: h200 (default), h100, a100, l40s, b200 |
//! | `count=2` | devices, at most 8 |
//! | `peer-access=off` | kernels of a device cannot touch the memory of another |
//! | `slow-link=10` | links between devices take so many times as long |
//! | `compute=8.0` | another compute capability than the product's |
//! | `multiprocessors=8` | fewer than the product has: kernels whose grids fill a device end sooner |
//! | `capacity=2GiB` | less memory than the product has: probes that walk a share of it end sooner |
//! | `l2=1MiB` | less than the product has |
//! | `time=shared` | host and device have one clock, this machine's: work takes as long as simulating it, or as on the product where that is longer |
//! | `slower=20000` | work takes so many times as long as on the product, with `time=shared` about what simulating it takes |
//! | `seed=7` | draws the order of threads and the noise of readings |
//! | `out-of-memory=120` | the 120th allocation fails |
//! | `illegal-address=500` | the 500th launch reads a wrong address; the error sticks |
//! | `lost=300` | the device is lost from the 300th call on |
//! | `hang=700` | the 700th launch never ends |
//! | `slow-kernel=rmsnorm*4` | kernels with this text in their names take 4 times as long; may be given again for other texts |
//! | `thermal=50`, `thermal=50+8` | from the 50th sample of NVML on, 16 or 8 samples say that heat holds the clocks down |
//! | `clock=40`, `clock=40+8` | from the 40th sample on, 16 or 8 samples show a lower SM clock and no reason |
//! | `ecc=3` | uncorrected errors of memory, each with a row to be replaced |
//! | `foreign-process=1` | other processes on each device, with 2 GiB each |
//! | `memory=zeros` | new memory is zero, and not a pattern that is not a number |
//! | `dependents=late` | no kernel begins before the one in front of it has ended |
//! | `busy-memory=20GiB` | bytes that others hold, with no process to be seen |

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use crate::device::{ComputeCapability, DEVICES, Device, Limits, MAX_DEVICES};

/// The environment variable that is read.
pub const VARIABLE: &str = "HBMARK_SIMULATED_CUDA";

/// Samples of NVML that a planted fault shows in, where the script says no number: eight blocks, which are sampled before and after.
const SAMPLES_OF_A_FAULT: u64 = 16;

/// Events of NVML's samples: `first` is counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub first: u64,
    pub samples: u64,
}

impl Span {
    /// Whether this sample, counted from 1, shows the fault.
    #[must_use]
    pub fn holds(self, sample: u64) -> bool {
        self.passed(sample) > 0 && sample - self.first < self.samples
    }

    /// Samples up to this one that showed the fault.
    #[must_use]
    pub fn passed(self, sample: u64) -> u64 {
        (sample + 1).saturating_sub(self.first).min(self.samples)
    }
}

/// Kernels that take longer.
#[derive(Debug, Clone, PartialEq)]
pub struct SlowKernel {
    /// A part of the kernel's name.
    pub part: String,
    pub times: f64,
}

/// What is simulated. Counts are from 1: the n-th event of the process.
#[derive(Debug, Clone, PartialEq)]
pub struct Script {
    pub device: &'static Device,
    pub count: u32,
    /// Whether kernels of a device can touch the memory of another.
    pub peer_access: bool,
    /// How many times as long links between devices take.
    pub slow_link: f64,
    /// Another capability than the product's.
    pub compute: Option<ComputeCapability>,
    /// Another number than the product's.
    pub multiprocessors: Option<u32>,
    /// Less memory and L2 than the product's.
    pub capacity_bytes: Option<u64>,
    pub l2_bytes: Option<u64>,
    pub slower: f64,
    pub shared_time: bool,
    pub seed: u64,
    /// The allocation that fails.
    pub out_of_memory: Option<u64>,
    /// The launch that reads a wrong address.
    pub illegal_address: Option<u64>,
    /// The call from which on the device is lost.
    pub lost: Option<u64>,
    /// The launch that never ends.
    pub hang: Option<u64>,
    pub slow_kernels: Vec<SlowKernel>,
    pub thermal: Option<Span>,
    pub clock: Option<Span>,
    pub uncorrected_errors: u32,
    pub foreign_processes: u32,
    pub busy_memory_bytes: u64,
    pub zeroed_memory: bool,
    pub late_dependents: bool,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            device: &DEVICES[0],
            count: 1,
            peer_access: true,
            slow_link: 1.0,
            compute: None,
            multiprocessors: None,
            capacity_bytes: None,
            l2_bytes: None,
            slower: 1.0,
            shared_time: false,
            seed: 0,
            out_of_memory: None,
            illegal_address: None,
            lost: None,
            hang: None,
            slow_kernels: Vec::new(),
            thermal: None,
            clock: None,
            uncorrected_errors: 0,
            foreign_processes: 0,
            busy_memory_bytes: 0,
            zeroed_memory: false,
            late_dependents: false,
        }
    }
}

/// Why a script cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScriptError {
    NoValue { part: String },
    UnknownKey { key: String },
    Twice { key: String },
    Value { key: String, value: String, wanted: &'static str },
}

impl fmt::Display for ScriptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoValue { part } => write!(f, "`{part}`: wanted key=value"),
            Self::UnknownKey { key } => write!(f, "`{key}`: no such key; known keys: {}", KEYS.join(", ")),
            Self::Twice { key } => write!(f, "`{key}` is given twice"),
            Self::Value { key, value, wanted } => write!(f, "`{key}={value}`: wanted {wanted}"),
        }
    }
}

impl std::error::Error for ScriptError {}

const KEYS: [&str; 23] = [
    "device",
    "count",
    "peer-access",
    "slow-link",
    "compute",
    "multiprocessors",
    "capacity",
    "l2",
    "time",
    "slower",
    "seed",
    "out-of-memory",
    "illegal-address",
    "lost",
    "hang",
    "slow-kernel",
    "thermal",
    "clock",
    "ecc",
    "foreign-process",
    "busy-memory",
    "memory",
    "dependents",
];

const WHICH: &str = "a number from 1 on";

impl Script {
    /// Reads a script; an empty one is one H200 without faults.
    ///
    /// # Errors
    /// Names the part that cannot be read.
    pub fn parse(text: &str) -> Result<Self, ScriptError> {
        let mut script = Self::default();
        let mut seen: Vec<&str> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let Some((key, value)) = part.split_once('=') else {
                return Err(ScriptError::NoValue { part: part.to_owned() });
            };
            let (key, value) = (key.trim(), value.trim());
            if seen.contains(&key) && key != "slow-kernel" {
                return Err(ScriptError::Twice { key: key.to_owned() });
            }
            seen.push(key);
            script.set(key, value)?;
        }
        Ok(script)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), ScriptError> {
        let or = |wanted| move || ScriptError::Value { key: key.to_owned(), value: value.to_owned(), wanted };
        match key {
            "device" => {
                self.device = Device::named(value).ok_or_else(or("h200, h100, a100, l40s or b200"))?;
            }
            "count" => {
                let count = number(value).filter(|count| (1..=MAX_DEVICES).contains(&(*count as usize)));
                self.count = count.ok_or_else(or("a number from 1 to 8"))?;
            }
            "peer-access" => {
                self.peer_access = !choice(value, ["on", "off"]).ok_or_else(or("on or off"))?;
            }
            "slow-link" => {
                let slower = number::<u32>(value).filter(|times| *times > 0);
                self.slow_link = slower.ok_or_else(or("a number from 1 on"))?.into();
            }
            "compute" => {
                self.compute =
                    Some(capability(value).ok_or_else(or("a known compute capability, such as 8.0"))?);
            }
            "seed" => self.seed = number(value).ok_or_else(or("a number"))?,
            "multiprocessors" => {
                let count = number(value).filter(|count| (1..=1024).contains(count));
                self.multiprocessors = Some(count.ok_or_else(or("a number from 1 to 1024"))?);
            }
            "capacity" => {
                let capacity = bytes(value).filter(|bytes| *bytes <= self.device.memory_bytes);
                self.capacity_bytes =
                    Some(capacity.ok_or_else(or("bytes that the device has, such as 2GiB"))?);
            }
            "l2" => {
                let cache = bytes(value).filter(|bytes| *bytes <= self.device.l2_bytes);
                self.l2_bytes = Some(cache.ok_or_else(or("bytes that the device has, such as 1MiB"))?);
            }
            "time" => {
                self.shared_time =
                    choice(value, ["modelled", "shared"]).ok_or_else(or("modelled or shared"))?
            }
            "slower" => {
                let slower = number::<u32>(value).filter(|times| *times > 0);
                self.slower = slower.ok_or_else(or("a number from 1 on"))?.into();
            }
            "out-of-memory" => self.out_of_memory = Some(ordinal(value).ok_or_else(or(WHICH))?),
            "illegal-address" => self.illegal_address = Some(ordinal(value).ok_or_else(or(WHICH))?),
            "lost" => self.lost = Some(ordinal(value).ok_or_else(or(WHICH))?),
            "hang" => self.hang = Some(ordinal(value).ok_or_else(or(WHICH))?),
            "slow-kernel" => {
                let slow = slow_kernel(value);
                self.slow_kernels
                    .push(slow.ok_or_else(or("a part of a name and a factor above 0, such as rmsnorm*4"))?);
            }
            "thermal" => {
                self.thermal =
                    Some(span(value).ok_or_else(or("a sample, or a sample and how many, such as 50+8"))?);
            }
            "clock" => {
                self.clock =
                    Some(span(value).ok_or_else(or("a sample, or a sample and how many, such as 40+8"))?);
            }
            "ecc" => self.uncorrected_errors = number(value).ok_or_else(or("a number"))?,
            "foreign-process" => {
                let count = number(value).filter(|count| *count <= 16);
                self.foreign_processes = count.ok_or_else(or("a number up to 16"))?;
            }
            "busy-memory" => self.busy_memory_bytes = bytes(value).ok_or_else(or("bytes, such as 20GiB"))?,
            "memory" => {
                self.zeroed_memory = choice(value, ["pattern", "zeros"]).ok_or_else(or("pattern or zeros"))?
            }
            "dependents" => {
                self.late_dependents = choice(value, ["early", "late"]).ok_or_else(or("early or late"))?
            }
            _ => return Err(ScriptError::UnknownKey { key: key.to_owned() }),
        }
        Ok(())
    }

    /// What the devices say that they can do.
    #[must_use]
    pub fn compute_capability(&self) -> ComputeCapability {
        self.compute.unwrap_or(self.device.compute_capability)
    }

    /// That of the code which a device of this capability loads.
    #[must_use]
    pub fn ptx_version(&self) -> i32 {
        let (major, minor) = self.compute_capability();
        i32::try_from(10 * major + minor).unwrap_or(i32::MAX)
    }

    /// Bytes of a device.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity_bytes.unwrap_or(self.device.memory_bytes)
    }

    /// # Panics
    /// Never: a script names only capabilities that have limits, and so does every device.
    #[must_use]
    pub fn limits(&self) -> Limits {
        Limits::of(self.compute_capability()).expect("checked when the script was read")
    }

    /// How many times as long a kernel of this name takes.
    #[must_use]
    pub fn slowness(&self, kernel: &str) -> f64 {
        let slow = self.slow_kernels.iter().filter(|slow| kernel.contains(&slow.part));
        slow.map(|slow| slow.times).product()
    }
}

/// The script of this process, read on first use. One that cannot be read ends the process with code 2.
pub fn script() -> &'static Script {
    static SCRIPT: OnceLock<Script> = OnceLock::new();
    SCRIPT.get_or_init(|| {
        let text = std::env::var_os(VARIABLE).unwrap_or_default();
        Script::parse(&text.to_string_lossy()).unwrap_or_else(|error| {
            eprintln!("{VARIABLE}: {error}");
            std::process::exit(2)
        })
    })
}

/// Digits alone: no sign, as `parse` takes.
fn number<N: FromStr>(text: &str) -> Option<N> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

/// Whether it is the second of two words.
fn choice(text: &str, words: [&str; 2]) -> Option<bool> {
    words.iter().position(|word| *word == text).map(|index| index == 1)
}

fn ordinal(text: &str) -> Option<u64> {
    number(text).filter(|n| *n > 0)
}

fn capability(text: &str) -> Option<ComputeCapability> {
    let (major, minor) = text.split_once('.')?;
    let capability = (number(major)?, number(minor)?);
    Limits::of(capability).map(|_| capability)
}

fn span(text: &str) -> Option<Span> {
    let (first, samples) = match text.split_once('+') {
        Some((first, samples)) => (first, ordinal(samples)?),
        None => (text, SAMPLES_OF_A_FAULT),
    };
    Some(Span { first: ordinal(first)?, samples })
}

fn slow_kernel(text: &str) -> Option<SlowKernel> {
    let (part, times) = text.rsplit_once('*')?;
    let times: f64 = times.parse().ok()?;
    (!part.is_empty() && times.is_finite() && times > 0.0)
        .then(|| SlowKernel { part: part.to_owned(), times })
}

fn bytes(text: &str) -> Option<u64> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("", 0)];
    units.iter().find_map(|(unit, shift)| number::<u64>(text.strip_suffix(unit)?)?.checked_mul(1 << shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_script_is_one_h200_without_faults() {
        let script = Script::parse(" ").unwrap();
        assert_eq!(script, Script::default());
        assert_eq!(
            (script.device.short_name, script.count, script.compute_capability()),
            ("h200", 1, (9, 0))
        );
        assert!((script.slowness("anything") - 1.0).abs() < f64::EPSILON);
    }

    #[test]
    fn every_part_is_read() {
        let script = Script::parse(
            "device=h100,count=2,peer-access=off,slow-link=10,compute=8.0,multiprocessors=8,capacity=2GiB,l2=1MiB,time=shared,slower=20,seed=7,out-of-memory=120,illegal-address=500, lost=300,hang=700,slow-kernel=rmsnorm*4,\
             slow-kernel=rms*1.5,thermal=50,clock=40+3,ecc=3,foreign-process=1,busy-memory=20GiB,memory=zeros,dependents=late",
        )
        .unwrap();
        let slow = |part: &str, times| SlowKernel { part: part.to_owned(), times };
        let wanted = Script {
            device: &DEVICES[1],
            count: 2,
            peer_access: false,
            slow_link: 10.0,
            compute: Some((8, 0)),
            multiprocessors: Some(8),
            capacity_bytes: Some(2 << 30),
            l2_bytes: Some(1 << 20),
            slower: 20.0,
            shared_time: true,
            seed: 7,
            out_of_memory: Some(120),
            illegal_address: Some(500),
            lost: Some(300),
            hang: Some(700),
            slow_kernels: vec![slow("rmsnorm", 4.0), slow("rms", 1.5)],
            thermal: Some(Span { first: 50, samples: 16 }),
            clock: Some(Span { first: 40, samples: 3 }),
            uncorrected_errors: 3,
            foreign_processes: 1,
            busy_memory_bytes: 20 << 30,
            zeroed_memory: true,
            late_dependents: true,
        };
        assert_eq!(script, wanted);
        assert!((script.slowness("rmsnorm_bf16") - 6.0).abs() < 1e-12);
        assert_eq!(script.limits().shared_bytes_per_block_opt_in, 163 << 10);
    }

    #[test]
    fn the_part_that_cannot_be_read_is_named() {
        for (text, message) in [
            ("device", "`device`: wanted key=value"),
            ("device=h300", "`device=h300`: wanted h200, h100, a100, l40s or b200"),
            ("count=0", "`count=0`: wanted a number from 1 to 8"),
            ("count=9", "`count=9`: wanted a number from 1 to 8"),
            ("seed=1,seed=2", "`seed` is given twice"),
            ("compute=8.7", "`compute=8.7`: wanted a known compute capability, such as 8.0"),
            ("lost=0", "`lost=0`: wanted a number from 1 on"),
            ("hang=+3", "`hang=+3`: wanted a number from 1 on"),
            ("thermal=5+0", "`thermal=5+0`: wanted a sample, or a sample and how many, such as 50+8"),
            (
                "slow-kernel=x*nan",
                "`slow-kernel=x*nan`: wanted a part of a name and a factor above 0, such as rmsnorm*4",
            ),
            (
                "slow-kernel=x*-1",
                "`slow-kernel=x*-1`: wanted a part of a name and a factor above 0, such as rmsnorm*4",
            ),
            ("capacity=200GiB", "`capacity=200GiB`: wanted bytes that the device has, such as 2GiB"),
            ("slower=0", "`slower=0`: wanted a number from 1 on"),
            ("busy-memory=20GB", "`busy-memory=20GB`: wanted bytes, such as 20GiB"),
            ("busy-memory=99999999999GiB", "`busy-memory=99999999999GiB`: wanted bytes, such as 20GiB"),
        ] {
            assert_eq!(Script::parse(text).unwrap_err().to_string(), message);
        }
        let unknown = Script::parse("oom=1").unwrap_err().to_string();
        assert!(unknown.starts_with("`oom`: no such key; known keys: device, count, "), "{unknown}");
        for key in KEYS {
            assert!(
                !matches!(Script::parse(&format!("{key}=")), Ok(_) | Err(ScriptError::UnknownKey { .. })),
                "{key}"
            );
        }
    }

    #[test]
    fn a_span_begins_and_ends() {
        let span = Span { first: 3, samples: 2 };
        assert_eq!((1..=6).filter(|sample| span.holds(*sample)).collect::<Vec<_>>(), [3, 4]);
        assert_eq!([2, 3, 4, 9].map(|sample| span.passed(sample)), [0, 1, 2, 2]);
    }
}
