//! What a decode step of published models launches, written down: `scripts/step_model.py` reads the file, and a change of a grid shows in it.

use std::fmt::Write as _;

use super::super::device::{Device, Gemm, GemmOperands, KernelLaunch};
use super::super::operations::CudaOperations;
use crate::engine::native::operations::{Operation, Operations, Steps, Storage};
use crate::engine::native::ragged_batch::Rows;
use crate::engine::native::shapes::PoolShape;
use crate::engine::native::testing::forward_of;
use crate::engine::timeline::MonotonicTimeline;
use crate::engine::{EngineError, Timeline};
use crate::weights::{StoredData, StoredMatrix, StoredTensor};
use half::bf16;
use hbmark_core::model::{Dtype, presets};

/// A device that keeps what is launched on it, and no memory.
#[derive(Debug)]
struct Recorder {
    multiprocessors: u32,
    next_address: u64,
    launched: Vec<KernelLaunch>,
}

#[derive(Debug)]
struct Place {
    address: u64,
    bytes: usize,
}

fn never<T>() -> Result<T, EngineError> {
    Err(EngineError::Device { device: "recorder".into(), detail: "it runs nothing".into() })
}

impl Device for Recorder {
    type Memory = Place;
    type Graph = ();

    fn name(&self) -> &'static str {
        "recorder"
    }
    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }
    fn shared_bytes(&self) -> usize {
        227 << 10
    }
    fn timeline(&self) -> Box<dyn Timeline + Send> {
        Box::new(MonotonicTimeline::default())
    }
    fn allocate(&mut self, bytes: usize) -> Result<Place, EngineError> {
        let address = self.next_address;
        self.next_address += bytes.next_multiple_of(256) as u64;
        Ok(Place { address, bytes })
    }
    fn address(memory: &Place) -> u64 {
        memory.address
    }
    fn bytes(memory: &Place) -> usize {
        memory.bytes
    }
    fn upload(&mut self, _: &Place, _: usize, _: &[u8]) -> Result<(), EngineError> {
        Ok(())
    }
    fn download(&mut self, _: &Place, _: usize, _: &mut [u8]) -> Result<(), EngineError> {
        never()
    }
    fn launch(&mut self, launch: &KernelLaunch) -> Result<(), EngineError> {
        self.launched.push(launch.clone());
        Ok(())
    }
    fn multiply(&mut self, _: &Gemm, _: &GemmOperands) -> Result<(), EngineError> {
        never()
    }
    fn begin_capture(&mut self) -> Result<(), EngineError> {
        never()
    }
    fn end_capture(&mut self) -> Result<(), EngineError> {
        never()
    }
    fn replay(&mut self, (): &()) -> Result<(), EngineError> {
        never()
    }
    fn synchronise(&mut self) -> Result<(), EngineError> {
        Ok(())
    }
}

const BLOCK_SIZE: usize = 64;

/// The launches of the first layer and of what is around the layers, a line each: operation, bytes that it must move, kernel, grid, threads,
/// shared memory.
fn launches(name: &str, multiprocessors: u32, into: &mut String) {
    let mut architecture = presets::find(name).unwrap().architecture;
    let layers = architecture.layers;
    architecture.layers = 1;
    let tensors = architecture.inventory(Dtype::Bf16).tensors.into_iter().map(|info| {
        let tensor = match *info.shape.as_slice() {
            [rows, columns] => {
                let data = StoredData::Bf16(vec![bf16::ZERO; rows * columns]);
                StoredTensor::Matrix(StoredMatrix { rows, columns, data })
            }
            ref shape => StoredTensor::Vector(vec![0.0; shape.iter().product()]),
        };
        (info.name, tensor)
    });
    let recorder = Recorder { multiprocessors, next_address: 1 << 20, launched: Vec::new() };
    let mut operations = CudaOperations::new(recorder);
    let mut forward = forward_of(&mut operations, &architecture, tensors).unwrap();
    for batch in [1, 8, 32] {
        for context in [512, 8192_usize] {
            let shape = PoolShape { layers: 1, ..PoolShape::of(&architecture, BLOCK_SIZE, Dtype::Bf16) };
            let mut pool = operations.pool(shape).unwrap();
            let blocks = (context + 1).div_ceil(BLOCK_SIZE);
            operations.reserve(&mut pool, batch * blocks + 1).unwrap();
            let mut rows = Rows::new(BLOCK_SIZE);
            for sequence in 0..batch {
                let table: Vec<u32> = (sequence * blocks..(sequence + 1) * blocks)
                    .map(|block| u32::try_from(block).unwrap())
                    .collect();
                rows.push(&[1], context, &table);
            }
            let padded = operations.padded(&rows);
            rows.pad(padded, u32::try_from(batch * blocks).unwrap());
            writeln!(
                into,
                "{name} layers={layers} batch={batch} context={context} multiprocessors={multiprocessors}"
            )
            .unwrap();
            operations.device_mut().launched.clear();
            let mut written = 0;
            let mut tell = |operations: &mut CudaOperations<Recorder>, operation: Operation| {
                let bytes = operations.take_bytes_moved().0;
                for launch in &operations.device().launched[written..] {
                    let [x, y, z] = launch.grid;
                    let KernelLaunch { kernel, threads, shared_bytes, .. } = launch;
                    writeln!(
                        into,
                        "  {operation:?} bytes={bytes} {kernel} grid={x},{y},{z} threads={threads} shared={shared_bytes}"
                    )
                    .unwrap();
                }
                written = operations.device().launched.len();
            };
            forward.step(&mut operations, &rows, &mut pool, &mut tell).unwrap();
        }
    }
}

#[test]
fn what_a_decode_step_launches_is_written_down() {
    let mut text = String::new();
    for name in ["Llama-3.1-8B", "Llama-3.2-1B"] {
        for multiprocessors in [132, 108] {
            launches(name, multiprocessors, &mut text);
        }
    }
    insta::assert_snapshot!("launches", text);
}

/// The emulated device finds kernels by name; a GPU loads the files that the driver lists.
#[test]
fn the_driver_loads_every_file_of_kernels() {
    let driver = include_str!("../driver.rs");
    let mut files = 0;
    for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "cu") {
            let name = path.file_stem().unwrap().to_str().unwrap();
            assert!(driver.contains(&format!("kernels!(\"{name}\")")), "{name}");
            files += 1;
        }
    }
    assert!(driver.contains(&format!("(&[&str], &[u8]); {files}]")), "{files} files");
}
