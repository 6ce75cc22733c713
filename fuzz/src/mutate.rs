//! Seeded mutations of structured bytes: lengths, counts, digits, names, brackets; the same for the same seed.

/// Pseudorandom numbers from a seed. *Source*: SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.number() % end as u64).unwrap_or(0)
    }
}

/// Integers at the edges of sums, products and allocations.
const EDGES: [u64; 16] = [
    0,
    1,
    7,
    8,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    0xffff_ffff,
    1 << 32,
    1 << 40,
    1 << 53,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX - 7,
    u64::MAX,
];

/// Replacements for a number in text.
const NUMBERS: [&str; 20] = [
    "0",
    "-0",
    "-1",
    "1",
    "1.5",
    "-1.5",
    "255",
    "65536",
    "2147483648",
    "4294967296",
    "9007199254740993",
    "18446744073709551615",
    "18446744073709551616",
    "99999999999999999999999",
    "1e18",
    "1e300",
    "-1e300",
    "1e999",
    "NaN",
    "Infinity",
];

/// Replacements for any other value.
const WORDS: [&str; 24] = [
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "[[[[[[[[",
    "}}}}",
    "\"../../etc/passwd\"",
    "\"\\u0000\"",
    "\"\\u001b[31m\"",
    "\"=1+1\"",
    "\"</script><img src=x onerror=1>\"",
    "\"\\u202e\"",
    ",",
    ":",
    "\n\n",
    "|",
    "\r\n",
    "(a+)+$",
    "{1000}",
    "\\",
    "\u{feff}",
    "-",
    "e",
];

/// Changes an input one to four times; parts of `others` are spliced in.
pub fn mutate(input: &[u8], others: &[&[u8]], head: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..=random.below(4) {
        once(&mut bytes, others, head, random);
    }
    bytes
}

fn once(bytes: &mut Vec<u8>, others: &[&[u8]], head: usize, random: &mut Random) {
    if bytes.is_empty() {
        bytes.extend(WORDS[random.below(WORDS.len())].as_bytes());
        return;
    }
    let reach = bytes.len().min(head);
    let at = random.below(reach);
    match random.below(12) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.number().to_le_bytes()[0],
        2 => bytes.truncate(random.below(bytes.len() + 1)),
        3 => {
            let end = (at + 1 + random.below(64)).min(bytes.len());
            bytes.drain(at..end);
        }
        4 => {
            let end = (at + 1 + random.below(256)).min(bytes.len());
            let part = bytes[at..end].to_vec();
            let times = 1 + random.below(16);
            let copies: Vec<u8> = part.iter().copied().cycle().take(part.len() * times).collect();
            bytes.splice(at..at, copies);
        }
        5 => {
            let other = others[random.below(others.len())];
            if !other.is_empty() {
                let from = random.below(other.len().min(head));
                let to = (from + 1 + random.below(512)).min(other.len());
                let end = (at + random.below(512)).min(bytes.len());
                bytes.splice(at..end, other[from..to].iter().copied());
            }
        }
        6 => {
            // A length or a count in a binary header, at any alignment.
            let edge = EDGES[random.below(EDGES.len())].to_le_bytes();
            let width = if random.below(2) == 0 { 8 } else { 4 };
            let end = (at + width).min(bytes.len());
            bytes[at..end].copy_from_slice(&edge[..end - at]);
        }
        7..=9 => replace_number(bytes, at, random),
        10 => {
            let word = WORDS[random.below(WORDS.len())].bytes();
            bytes.splice(at..at, word);
        }
        _ => replace_value(bytes, at, random),
    }
}

/// Replaces the next number.
fn replace_number(bytes: &mut Vec<u8>, from: usize, random: &mut Random) {
    let is_number = |byte: &u8| byte.is_ascii_digit() || matches!(byte, b'.' | b'-' | b'+' | b'e' | b'E');
    let Some(start) = bytes[from..].iter().position(u8::is_ascii_digit).map(|offset| from + offset) else {
        return;
    };
    let end =
        bytes[start..].iter().position(|byte| !is_number(byte)).map_or(bytes.len(), |length| start + length);
    bytes.splice(start..end, NUMBERS[random.below(NUMBERS.len())].bytes());
}

/// Replaces the text between two structural characters.
fn replace_value(bytes: &mut Vec<u8>, from: usize, random: &mut Random) {
    let is_mark = |byte: &u8| matches!(byte, b',' | b':' | b'[' | b']' | b'{' | b'}' | b'=' | b'\n' | b'|');
    let Some(start) = bytes[from..].iter().position(is_mark).map(|offset| from + offset + 1) else { return };
    let end = bytes[start..].iter().position(is_mark).map_or(bytes.len(), |length| start + length);
    bytes.splice(start..end, WORDS[random.below(WORDS.len())].bytes());
}
