//! Attention over a chunk of positions, which lie in tiles of sixteen.
//!
//! Enters: scaled queries, pointers to the tiles of K and V of one head of a chunk. Leaves: scores, weights, and weighted sums of V. Those over
//! elements of a cache are methods of [`Element`], so that they are compiled here. Scores and weights are `[query][CHUNK]`.
#![expect(unsafe_code, reason = "kernels read the cache through pointers")]

use std::ops::Range;

use crate::element::Element;
use crate::simd::{LANES, Simd, dispatch, each, exp, nth, prefetch};

/// Positions whose scores are kept at a time; a multiple of the lanes.
pub const CHUNK: usize = 256;

/// Where the tiles of a chunk lie.
pub type Tiles<E> = [*const E; CHUNK / LANES];

/// Queries of an inner tile.
const TILE: usize = 4;

/// Multiplies what belongs to positions of a chunk, of each query, with the scales of their vectors.
///
/// # Safety
/// The pointers of `tiles` are valid for a tile each.
pub unsafe fn multiply_by_scales(scales: &Tiles<f32>, tiles: Range<usize>, of_positions: &mut [f32]) {
    for tile in tiles {
        // SAFETY: the caller's promise; any 16 f32 are aligned to one.
        let scales = unsafe { scales[tile].cast::<[f32; LANES]>().read() };
        for query in of_positions.chunks_exact_mut(CHUNK) {
            let (query, _) = query[tile * LANES..].as_chunks_mut::<LANES>();
            query[0].iter_mut().zip(scales).for_each(|(x, scale)| *x *= scale);
        }
    }
}

/// Tiles of K ahead of the one in work that are asked for: blocks are short, so the processor's own prefetch starts anew at each.
const TILES_AHEAD: usize = 2;

/// Rows of V likewise.
const ROWS_AHEAD: usize = 24;

/// `scores[q][position] = q · k` over the tiles of a chunk.
#[inline(always)]
unsafe fn qk_scores_chunk<S: Simd, E: Element>(
    keys: &Tiles<E>,
    tiles: Range<usize>,
    dim: usize,
    queries: &[f32],
    scores: &mut [f32],
) {
    for tile in tiles.clone() {
        let ahead = if tile + TILES_AHEAD < tiles.end { keys[tile + TILES_AHEAD] } else { keys[tile] };
        let (mut query, mut score) = (queries.as_ptr(), scores[tile * LANES..].as_mut_ptr());
        let mut left = queries.len() / dim;
        while left > 0 {
            let done = left.min(TILE);
            // SAFETY: `done` queries of `dim` elements and as many chunks of scores are left; the tile has `dim` × 16 keys.
            unsafe {
                match done {
                    1 => qk_scores_tile::<S, E, 1>(keys[tile], ahead, dim, query, score),
                    2 => qk_scores_tile::<S, E, 2>(keys[tile], ahead, dim, query, score),
                    3 => qk_scores_tile::<S, E, 3>(keys[tile], ahead, dim, query, score),
                    _ => qk_scores_tile::<S, E, TILE>(keys[tile], ahead, dim, query, score),
                }
                query = query.add(done * dim);
                score = score.add(if done < left { done * CHUNK } else { 0 });
            }
            left -= done;
        }
    }
}
dispatch! {
    /// `scores[q][position] = q · k` over the tiles of a chunk.
    pub(crate) fn scores[E: Element][E](
        keys: &Tiles<E>,
        tiles: Range<usize>,
        dim: usize,
        queries: &[f32],
        scores: &mut [f32],
    ) = qk_scores_chunk
}

#[inline(always)]
unsafe fn qk_scores_tile<S: Simd, E: Element, const Q: usize>(
    keys: *const E,
    ahead: *const E,
    dim: usize,
    queries: *const f32,
    scores: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [S::zero(); Q];
        for d in 0..dim {
            prefetch::<false, _>(nth(ahead, d, LANES));
            let key = E::load::<S>(nth(keys, d, LANES));
            for (q, sum) in sums.iter_mut().enumerate() {
                *sum = S::mul_add(key, S::splat(*nth(queries, q, dim).add(d)), *sum);
            }
        }
        for (q, sum) in sums.into_iter().enumerate() {
            S::store(scores.add(q * CHUNK), sum);
        }
    }
}

/// Positions of an inner tile of scores over rows.
const TILE_POSITIONS: usize = 4;

/// `scores[q][position] = q · k` over positions of a chunk whose keys are rows.
#[inline(always)]
unsafe fn row_scores_chunk<S: Simd, E: Element>(
    rows: &Tiles<E>,
    positions: Range<usize>,
    stride: usize,
    queries: &[f32],
    scores: &mut [f32],
) {
    let row = |position: usize| nth(rows[position / LANES], position % LANES, stride);
    for first in positions.clone().step_by(TILE_POSITIONS) {
        // A tile that lacks positions does its last one again.
        let keys: [*const E; TILE_POSITIONS] =
            std::array::from_fn(|i| row((first + i).min(positions.end - 1)));
        let ahead = row((first + ROWS_AHEAD / 2).min(positions.end - 1));
        let (mut query, mut score) = (queries.as_ptr(), scores[first..].as_mut_ptr());
        let mut left = queries.len() / stride;
        let count = TILE_POSITIONS.min(positions.end - first);
        while left > 0 {
            let done = left.min(TILE);
            // SAFETY: `done` queries of `stride` elements and as many chunks of scores are left; the keys have as many elements.
            unsafe {
                match done {
                    1 => row_scores_tile::<S, E, 1>(&keys, ahead, stride, query, score, count),
                    2 => row_scores_tile::<S, E, 2>(&keys, ahead, stride, query, score, count),
                    3 => row_scores_tile::<S, E, 3>(&keys, ahead, stride, query, score, count),
                    _ => row_scores_tile::<S, E, TILE>(&keys, ahead, stride, query, score, count),
                }
                query = query.add(done * stride);
                score = score.add(if done < left { done * CHUNK } else { 0 });
            }
            left -= done;
        }
    }
}
dispatch! {
    /// The same over positions of a chunk whose keys are rows.
    pub(crate) fn row_scores[E: Element][E](
        rows: &Tiles<E>,
        positions: Range<usize>,
        stride: usize,
        queries: &[f32],
        scores: &mut [f32],
    ) = row_scores_chunk
}

#[inline(always)]
unsafe fn row_scores_tile<S: Simd, E: Element, const Q: usize>(
    keys: &[*const E; TILE_POSITIONS],
    ahead: *const E,
    stride: usize,
    queries: *const f32,
    scores: *mut f32,
    count: usize,
) {
    // SAFETY: the caller's promise: `stride` elements of every key and query, a whole number of lanes.
    unsafe {
        let mut sums = [[S::zero(); TILE_POSITIONS]; Q];
        for at in (0..stride).step_by(LANES) {
            prefetch::<false, _>(ahead.wrapping_add(at));
            let keys: [S::Floats; TILE_POSITIONS] =
                each!(S::zero(), |p| E::load::<S>(keys[p].wrapping_add(at)));
            for (q, sums) in sums.iter_mut().enumerate() {
                let query = S::load(nth(queries, q, stride).add(at));
                for (sum, key) in sums.iter_mut().zip(keys) {
                    *sum = S::mul_add(key, query, *sum);
                }
            }
        }
        for (q, sums) in sums.into_iter().enumerate() {
            for (p, sum) in sums.into_iter().enumerate().take(count) {
                scores.add(q * CHUNK + p).write(across::<S>(sum).into_iter().sum());
            }
        }
    }
}

#[inline(always)]
unsafe fn online_softmax_chunk<S: Simd>(
    scores: &mut [f32],
    visible: Range<usize>,
    largest: &mut f32,
    sum: &mut f32,
    values: &mut [f32],
) {
    if visible.is_empty() {
        scores.fill(0.0);
        return;
    }
    scores[..visible.start].fill(f32::NEG_INFINITY);
    scores[visible.end..].fill(f32::NEG_INFINITY);
    // SAFETY: a chunk is a whole number of lanes, and so is a row of values.
    unsafe {
        let mut most = S::splat(*largest);
        for at in (0..CHUNK).step_by(LANES) {
            most = S::max(most, S::load(scores.as_ptr().add(at)));
        }
        let new = across::<S>(most).into_iter().fold(f32::NEG_INFINITY, f32::max);
        let minus = S::splat(-new);
        let mut total = S::zero();
        for at in (0..CHUNK).step_by(LANES) {
            let weight = exp::<S>(S::add(S::load(scores.as_ptr().add(at)), minus));
            S::store(scores.as_mut_ptr().add(at), weight);
        }
        // `exp` ends at -87: what is hidden must weigh nothing at all.
        scores[..visible.start].fill(0.0);
        scores[visible.end..].fill(0.0);
        for at in (0..CHUNK).step_by(LANES) {
            total = S::add(total, S::load(scores.as_ptr().add(at)));
        }
        let kept = if *largest == f32::NEG_INFINITY { 0.0 } else { (*largest - new).exp() };
        // Nothing to scale where the largest score stays.
        if new > *largest {
            let factor = S::splat(kept);
            for at in (0..values.len()).step_by(LANES) {
                let value = S::mul(S::load(values.as_ptr().add(at)), factor);
                S::store(values.as_mut_ptr().add(at), value);
            }
        }
        *sum = *sum * kept + across::<S>(total).into_iter().sum::<f32>();
        *largest = new;
    }
}
dispatch! {
    /// One chunk of a running softmax: scores become weights relative to the largest score so far, and what was summed under a smaller one is
    /// scaled down. `values` are what was summed.
    ///
    /// # Safety
    /// The set is available.
    pub fn online_softmax(scores: &mut [f32], visible: Range<usize>, largest: &mut f32, sum: &mut f32, values: &mut [f32]) =
        online_softmax_chunk
}

#[inline(always)]
unsafe fn across<S: Simd>(vector: S::Floats) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    // SAFETY: sixteen elements.
    unsafe { S::store(lanes.as_mut_ptr(), vector) };
    lanes
}

/// `values[q] += Σ weights[q][position] · v[position]` over positions of a chunk; rows of V are `row_stride` apart, and values `stride`, which
/// is no more.
#[inline(always)]
unsafe fn accumulate_pv_chunk<S: Simd, E: Element>(
    rows: &Tiles<E>,
    positions: Range<usize>,
    (row_stride, stride): (usize, usize),
    weights: &[f32],
    values: &mut [f32],
) {
    let strides = (row_stride, stride);
    let (mut weight, mut value) = (weights.as_ptr(), values.as_mut_ptr());
    let mut left = values.len() / stride;
    while left > 0 {
        let done = left.min(TILE);
        // SAFETY: `done` chunks of weights and rows of values are left.
        unsafe {
            match done {
                1 => accumulate_pv_tile::<S, E, 1>(rows, positions.clone(), strides, weight, value),
                2 => accumulate_pv_tile::<S, E, 2>(rows, positions.clone(), strides, weight, value),
                3 => accumulate_pv_tile::<S, E, 3>(rows, positions.clone(), strides, weight, value),
                _ => accumulate_pv_tile::<S, E, TILE>(rows, positions.clone(), strides, weight, value),
            }
            weight = weight.add(done * CHUNK);
            value = value.add(done * stride);
        }
        left -= done;
    }
}
dispatch! {
    /// Values, weighted.
    pub(crate) fn accumulate_pv[E: Element][E](
        rows: &Tiles<E>,
        positions: Range<usize>,
        strides: (usize, usize),
        weights: &[f32],
        values: &mut [f32],
    ) = accumulate_pv_chunk
}

/// Vectors of V that a tile takes at a time, at the most.
const VECTORS: usize = 4;

#[inline(always)]
unsafe fn accumulate_pv_tile<S: Simd, E: Element, const Q: usize>(
    rows: &Tiles<E>,
    positions: Range<usize>,
    strides @ (_, stride): (usize, usize),
    weights: *const f32,
    values: *mut f32,
) {
    let mut at = 0;
    while at < stride {
        let left = (stride - at) / LANES;
        // Twice as many sums: a few that do not fit cost less than reading V by half cache lines.
        let fits = |vectors: usize| left >= vectors && Q * vectors <= 2 * S::MOST_SUMS;
        let positions = positions.clone();
        // SAFETY: `left` vectors of every row and value are left.
        unsafe {
            if fits(VECTORS) {
                accumulate_pv_block::<S, E, Q, VECTORS>(rows, positions, strides, at, weights, values);
                at += VECTORS * LANES;
            } else if fits(2) {
                accumulate_pv_block::<S, E, Q, 2>(rows, positions, strides, at, weights, values);
                at += 2 * LANES;
            } else {
                accumulate_pv_block::<S, E, Q, 1>(rows, positions, strides, at, weights, values);
                at += LANES;
            }
        }
    }
}

#[inline(always)]
unsafe fn accumulate_pv_block<S: Simd, E: Element, const Q: usize, const V: usize>(
    rows: &Tiles<E>,
    positions: Range<usize>,
    (row_stride, stride): (usize, usize),
    at: usize,
    weights: *const f32,
    values: *mut f32,
) {
    // SAFETY: the caller's promise: V vectors from `at` on, in every row of V and of values.
    unsafe {
        let mut sums: [[S::Floats; V]; Q] = each!([S::zero(); V], |q| {
            each!(S::zero(), |v| S::load(values.add(q * stride + at + v * LANES)))
        });
        for position in positions {
            let next = position.wrapping_add(ROWS_AHEAD) % CHUNK;
            let ahead = nth(rows[next / LANES], next % LANES, row_stride).wrapping_add(at);
            // A row of V vectors is V · 16 elements: two vectors of 16 bits to a line.
            for v in 0..V {
                prefetch::<false, _>(ahead.wrapping_add(v * LANES));
            }
            let row = nth(rows[position / LANES], position % LANES, row_stride).wrapping_add(at);
            let row: [S::Floats; V] = each!(S::zero(), |v| E::load::<S>(row.add(v * LANES)));
            for (q, sums) in sums.iter_mut().enumerate() {
                let weight = S::splat(*nth(weights, q, CHUNK).add(position));
                for (sum, value) in sums.iter_mut().zip(row) {
                    *sum = S::mul_add(value, weight, *sum);
                }
            }
        }
        for (q, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                S::store(values.add(q * stride + at + v * LANES), sum);
            }
        }
    }
}
