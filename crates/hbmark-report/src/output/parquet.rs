//! A document's sheet as a Parquet file, for notebooks: the columns of the CSV, with types.
//!
//! Enters: a [`Document`] that has a sheet of raw numbers. Leaves: the bytes of a file with one row group, plain and uncompressed. Numbers are doubles,
//! seeds are 64-bit integers and words are strings, null where they are not known. Written here because the library for it brings calendars and hash functions that nothing else
//! needs; the format: <https://parquet.apache.org/docs/file-format/>, its metadata in Thrift's compact protocol.

use super::document::{Cells, Column, Document, Value};

const MAGIC: &[u8; 4] = b"PAR1";

// Numbers of the format's definition.
const LONG: i64 = 2;
const DOUBLE: i64 = 5;
const BYTE_ARRAY: i64 = 6;
const OPTIONAL: i64 = 1;
const UTF8: i64 = 0;
const UINT_64: i64 = 14;
const PLAIN: i64 = 0;
const RLE: i64 = 3;
const UNCOMPRESSED: i64 = 0;
const DATA_PAGE: i64 = 0;

/// The title of the column whose numbers a double cannot hold.
const SEED: &str = "seed";

/// A column as it is stored; a cell without a value is none.
enum Stored<'a> {
    Doubles(Vec<Option<f64>>),
    Counts(Vec<Option<u64>>),
    Strings(Vec<Option<&'a str>>),
}

/// The bytes of a file; none of a document without a sheet.
pub fn render(document: &Document) -> Option<Vec<u8>> {
    let sheet = document.sheet.as_ref()?;
    let columns = sheet.iter().map(|column| (column.title_with_unit(), stored_column(column)));
    Some(file(&columns.collect::<Vec<_>>()))
}

fn stored_column(column: &Column) -> Stored<'_> {
    match &column.cells {
        Cells::Numbers(cells) if column.title == SEED => {
            Stored::Counts(cells.iter().map(|cell| cell.parse().ok()).collect())
        }
        cells => stored(cells),
    }
}

fn stored(cells: &Cells) -> Stored<'_> {
    match cells {
        Cells::Measured { values, .. } => Stored::Doubles(values.iter().map(number).collect()),
        Cells::Numbers(cells) if cells.iter().all(|cell| cell.is_empty() || cell.parse::<f64>().is_ok()) => {
            Stored::Doubles(cells.iter().map(|cell| cell.parse().ok()).collect())
        }
        Cells::Words(cells) | Cells::Numbers(cells) | Cells::Bars(cells) => Stored::Strings(
            cells.iter().map(|cell| Some(cell.as_str()).filter(|cell| !cell.is_empty())).collect(),
        ),
    }
}

/// What is known of a number.
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Finite(value) | Value::Disturbed(value) => Some(*value),
        Value::Doubtful(spread) => Some(spread.median),
        Value::Infinite => Some(f64::INFINITY),
        Value::Null | Value::Word(_) => None,
    }
}

impl Stored<'_> {
    fn rows(&self) -> usize {
        match self {
            Self::Doubles(cells) => cells.len(),
            Self::Counts(cells) => cells.len(),
            Self::Strings(cells) => cells.len(),
        }
    }

    fn kind(&self) -> i64 {
        match self {
            Self::Doubles(_) => DOUBLE,
            Self::Counts(_) => LONG,
            Self::Strings(_) => BYTE_ARRAY,
        }
    }

    /// One data page: which cells have a value, a bit each, then the values.
    fn page(&self) -> Vec<u8> {
        let mut data = Vec::new();
        let present: Vec<bool> = match self {
            Self::Doubles(cells) => {
                cells.iter().flatten().for_each(|value| data.extend(value.to_le_bytes()));
                cells.iter().map(Option::is_some).collect()
            }
            Self::Counts(cells) => {
                cells.iter().flatten().for_each(|value| data.extend(value.to_le_bytes()));
                cells.iter().map(Option::is_some).collect()
            }
            Self::Strings(cells) => {
                for text in cells.iter().flatten() {
                    data.extend(length(text.len()));
                    data.extend(text.as_bytes());
                }
                cells.iter().map(Option::is_some).collect()
            }
        };
        let mut levels = Thrift::default();
        let groups = present.chunks(8);
        levels.varint(groups.len() as u64 * 2 + 1);
        levels
            .0
            .extend(groups.map(|group| group.iter().rev().fold(0, |bits, bit| bits << 1 | u8::from(*bit))));
        let size = |bytes: usize| i64::try_from(bytes).unwrap_or(i64::MAX);
        let whole = size(4 + levels.0.len() + data.len());
        let mut page = Thrift::default();
        page.structure(|header| {
            header.int32(1, DATA_PAGE).int32(2, whole).int32(3, whole).field(5, STRUCT).structure(|page| {
                page.int32(1, size(present.len())).int32(2, PLAIN).int32(3, RLE).int32(4, RLE);
            });
        });
        page.0.extend(length(levels.0.len()));
        [page.0, levels.0, data].concat()
    }
}

fn length(bytes: usize) -> [u8; 4] {
    u32::try_from(bytes).unwrap_or(u32::MAX).to_le_bytes()
}

fn file(columns: &[(String, Stored<'_>)]) -> Vec<u8> {
    let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    let rows = columns.first().map_or(0, |(_, stored)| stored.rows());
    let mut file = MAGIC.to_vec();
    // Where each column's page begins and ends.
    let mut places = Vec::new();
    if rows > 0 {
        for (_, stored) in columns {
            let begin = file.len();
            file.extend(stored.page());
            places.push((count(begin), count(file.len() - begin)));
        }
    }
    let mut metadata = Thrift::default();
    metadata.structure(|metadata| {
        metadata.int32(1, 1).field(2, LIST).list(STRUCT, columns.len() + 1);
        metadata.structure(|root| {
            root.text(4, "hbmark").int32(5, count(columns.len()));
        });
        for (name, stored) in columns {
            metadata.structure(|column| {
                column.int32(1, stored.kind()).int32(3, OPTIONAL).text(4, name);
                if stored.kind() == LONG {
                    column.int32(6, UINT_64);
                }
                if stored.kind() == BYTE_ARRAY {
                    column.int32(6, UTF8).field(10, STRUCT).structure(|logical| {
                        logical.field(1, STRUCT).structure(|_| {});
                    });
                }
            });
        }
        metadata.int64(3, count(rows)).field(4, LIST).list(STRUCT, usize::from(rows > 0));
        if rows > 0 {
            metadata.structure(|group| {
                group.field(1, LIST).list(STRUCT, columns.len());
                for ((name, stored), (begin, bytes)) in columns.iter().zip(&places) {
                    group.structure(|chunk| {
                        chunk.int64(2, *begin).field(3, STRUCT).structure(|column| {
                            column.int32(1, stored.kind()).field(2, LIST).list(INT32, 2);
                            column.zigzag(PLAIN).zigzag(RLE).field(3, LIST).list(BINARY, 1).bytes(name);
                            column.int32(4, UNCOMPRESSED).int64(5, count(rows));
                            column.int64(6, *bytes).int64(7, *bytes).int64(9, *begin);
                        });
                    });
                }
                group.int64(2, places.iter().map(|(_, bytes)| bytes).sum()).int64(3, count(rows));
            });
        }
        metadata.text(6, concat!("hbmark version ", env!("CARGO_PKG_VERSION")));
    });
    file.extend(&metadata.0);
    file.extend(length(metadata.0.len()));
    file.extend(MAGIC);
    file
}

// Types of fields in the compact protocol.
const INT32: u8 = 5;
const INT64: u8 = 6;
const BINARY: u8 = 8;
const LIST: u8 = 9;
const STRUCT: u8 = 12;

/// A writer of Thrift's compact protocol. Fields of a structure in rising order, each as the distance from the last.
#[derive(Default)]
struct Thrift(Vec<u8>, u8);

impl Thrift {
    fn varint(&mut self, mut value: u64) {
        while value > 0x7f {
            self.0.push(value.to_le_bytes()[0] | 0x80);
            value >>= 7;
        }
        self.0.push(value.to_le_bytes()[0]);
    }

    fn zigzag(&mut self, value: i64) -> &mut Self {
        self.varint((value << 1 ^ value >> 63).cast_unsigned());
        self
    }

    fn bytes(&mut self, text: &str) -> &mut Self {
        self.varint(text.len() as u64);
        self.0.extend(text.as_bytes());
        self
    }

    fn field(&mut self, id: u8, kind: u8) -> &mut Self {
        self.0.push((id - self.1) << 4 | kind);
        self.1 = id;
        self
    }

    fn int32(&mut self, id: u8, value: i64) -> &mut Self {
        self.field(id, INT32).zigzag(value)
    }

    fn int64(&mut self, id: u8, value: i64) -> &mut Self {
        self.field(id, INT64).zigzag(value)
    }

    fn text(&mut self, id: u8, text: &str) -> &mut Self {
        self.field(id, BINARY).bytes(text)
    }

    fn list(&mut self, kind: u8, len: usize) -> &mut Self {
        match u8::try_from(len) {
            Ok(len) if len < 15 => self.0.push(len << 4 | kind),
            _ => {
                self.0.push(0xf0 | kind);
                self.varint(len as u64);
            }
        }
        self
    }

    fn structure(&mut self, fields: impl FnOnce(&mut Self)) {
        let outer = std::mem::take(&mut self.1);
        fields(self);
        self.0.push(0);
        self.1 = outer;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::Kind;
    use crate::output::metrics::Unit;
    use crate::samples;

    /// As pyarrow 26.0.1 reads it: `[1.5, None, None, inf, None, 1.0, 2.0, 3.0, 4.0]`, `[1, None, 2.5, …]`, `['1', 'two', None, …]`, `['=1+1', None, 'ok', '日本', …]`.
    #[test]
    fn a_small_file_has_the_bytes_that_another_reader_has_read() {
        let nine = |cells: [&str; 9]| cells.map(str::to_owned).to_vec();
        let values = [
            Value::Finite(1.5),
            Value::Null,
            Value::Null,
            Value::Infinite,
            Value::Word("none"),
            Value::Finite(1.0),
            Value::Finite(2.0),
            Value::Finite(3.0),
            Value::Finite(4.0),
        ];
        let cells = [
            Cells::Measured { unit: Unit::Nanoseconds, alike: false, values: values.into() },
            Cells::Numbers(nine(["1", "", "2.5", "-3", "1e3", "6", "7", "8", "9"])),
            Cells::Numbers(nine(["1", "two", "", "3", "4", "5", "6", "7", "8"])),
            Cells::Words(nine(["=1+1", "", "ok", "日本", "3", "4", "5", "6", "7"])),
        ];
        let names = ["measured", "numbers", "mixed", "words"].map(str::to_owned);
        let bytes = file(&names.into_iter().zip(cells.iter().map(stored)).collect::<Vec<_>>());
        let hex: Vec<String> =
            bytes.chunks(32).map(|line| format!("{line:02x?}").replace(['[', ',', ' ', ']'], "")).collect();
        insta::assert_snapshot!(hex.join("\n"));
    }

    #[test]
    fn a_result_has_all_columns_of_its_csv_and_one_without_a_sheet_has_no_file() {
        let report = samples::measured();
        let bytes = render(&report.document()).unwrap();
        assert!(bytes.starts_with(MAGIC) && bytes.ends_with(MAGIC));
        let text = String::from_utf8_lossy(&bytes);
        for column in report.document().sheet.unwrap() {
            assert!(
                text.matches(&column.title_with_unit()).count() >= 2,
                "in the schema and beside its page"
            );
        }
        assert!(text.contains(&report.cells[0].id));
        assert!(render(&Document::default()).is_none());
        // A sheet without rows has columns and no row group.
        let empty = file(&[("a".to_owned(), Stored::Doubles(Vec::new()))]);
        assert!(empty.len() < 80, "{}", empty.len());
    }

    #[test]
    fn numbers_of_the_compact_protocol() {
        let encoded = |value: i64| {
            let mut thrift = Thrift::default();
            thrift.zigzag(value);
            thrift.0
        };
        assert_eq!(encoded(0), [0]);
        assert_eq!(encoded(-1), [1]);
        assert_eq!(encoded(63), [126]);
        assert_eq!(encoded(64), [128, 1]);
        assert_eq!(encoded(150), [0xac, 2]);
        let mut list = Thrift::default();
        list.list(INT32, 14).list(INT32, 15);
        assert_eq!(list.0, [0xe5, 0xf5, 15]);
    }

    #[test]
    fn seeds_keep_all_their_digits() {
        let seeds = ["13679457532755275413", "", "7"].map(str::to_owned).to_vec();
        let column = crate::output::document::numbers(SEED, seeds.clone());
        let Stored::Counts(counts) = stored_column(&column) else { panic!("{column:?}") };
        assert_eq!(counts, [Some(13_679_457_532_755_275_413), None, Some(7)]);
        let other = crate::output::document::numbers("served", seeds);
        assert!(matches!(stored_column(&other), Stored::Doubles(_)));
    }
}
