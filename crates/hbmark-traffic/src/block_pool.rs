//! The paged KV block pool: reference counts and a prefix cache.
//!
//! Enters: allocations, and the tokens of computed blocks. Leaves: block numbers. The pool holds no KV itself.
//!
//! A full block is identified by a [`PrefixId`]: a number for one sequence of tokens from position 0 on, assigned when the block is first
//! cached and never reused. A block is looked up by the hash of (prefix of the block before, own tokens), and a hit counts only if both
//! are equal. So a hit is on an identical prefix, by induction, whatever the hash function does.
//!
//! An unreferenced block stays cached until it is evicted, least recently used first. A sequence frees its blocks from the end, so that a
//! prefix is evicted after its continuations.
//!
//! Only blocks that were ever allocated take memory here: a pool may be as large as a device's memory allows, and most runs use little
//! of it.

use std::collections::HashMap;

/// Identifies the tokens from position 0 to the end of a cached block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PrefixId(u64);

impl PrefixId {
    /// The empty prefix.
    pub const ROOT: Self = Self(0);

    /// The empty prefix of an adapter's sequences: adapters share no blocks. Other ids count up from 1, these down from the top.
    pub fn of(adapter: Option<u32>) -> Self {
        adapter.map_or(Self::ROOT, |adapter| Self(u64::MAX - u64::from(adapter)))
    }
}

/// No neighbour in the list of free blocks.
const NONE: u32 = u32::MAX;

/// One block.
#[derive(Debug, Clone, Copy)]
struct Block {
    ref_count: u32,
    cached: Option<Cached>,
    /// Neighbours in the list of unreferenced blocks.
    before: u32,
    after: u32,
}

/// Blocks to reserve memory for, so that most runs allocate nothing while they are timed: 4 million positions at 16 per block.
const PREALLOCATED_BLOCKS: usize = 1 << 18;
/// The same for the tokens of cached blocks.
const PREALLOCATED_TOKENS: usize = 1 << 24;

/// The content of a cached block; its tokens are in [`BlockPool::tokens`].
#[derive(Debug, Clone, Copy)]
struct Cached {
    key: u64,
    parent: PrefixId,
    prefix: PrefixId,
}

/// Counters of the prefix cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheStats {
    /// Tokens of prompts that were looked up, and those of them that were found.
    pub queried_tokens: u64,
    pub hit_tokens: u64,
    /// Cached blocks that were evicted.
    pub evictions: u64,
    /// Blocks not cached because another prefix had the same hash.
    pub collisions: u64,
}

/// Bugs that tests plant in a scheduler, to prove that they detect them.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SchedulerBug {
    /// A shared block is not counted.
    SkipsRefcount,
    /// Equal hashes are taken for equal prefixes.
    TrustsHashes,
    /// An unreferenced block is not freed.
    LeaksBlocks,
    /// A preempted request does not return to the queue.
    LosesPreempted,
    /// A step takes one token more than its budget.
    ExceedsBudget,
    /// The last request starts first.
    BreaksOrder,
    /// Prefixes are shared whatever the adapter.
    ForgetsAdapters,
    /// One adapter too many runs at once.
    ExceedsAdapters,
    /// A rejected draft token counts as computed.
    KeepsRejectedDrafts,
}

/// A pool of blocks with reference counts and a prefix cache.
#[derive(Debug)]
pub struct BlockPool {
    block_size: usize,
    total: usize,
    /// The blocks that were ever allocated, from 0 on. The others are free and without content.
    blocks: Vec<Block>,
    /// The tokens of cached blocks, `block_size` per block.
    tokens: Vec<u32>,
    /// First and last of the list of unreferenced blocks: those without content, then the cached ones, least recently used first.
    first: u32,
    last: u32,
    free: usize,
    index: Option<HashMap<u64, u32>>,
    next_prefix_id: u64,
    counts: CacheStats,
    /// The bits of a hash in use; fewer in tests, so that prefixes collide.
    mask: u64,
    #[cfg(test)]
    pub(super) fault: Option<SchedulerBug>,
}

impl BlockPool {
    /// A pool of `blocks` blocks of `block_size` positions each.
    ///
    /// # Panics
    /// When a block has no positions, or there are 2^32 blocks.
    pub fn new(blocks: usize, block_size: usize, cache_prefixes: bool) -> Self {
        assert!(block_size > 0, "a block has positions");
        assert!(u32::try_from(blocks).is_ok_and(|count| count != NONE), "fewer than 2^32 blocks");
        let room = blocks.min(PREALLOCATED_BLOCKS);
        let room_tokens =
            if cache_prefixes { room.saturating_mul(block_size).min(PREALLOCATED_TOKENS) } else { 0 };
        Self {
            block_size,
            total: blocks,
            blocks: Vec::with_capacity(room),
            tokens: Vec::with_capacity(room_tokens),
            first: NONE,
            last: NONE,
            free: blocks,
            index: cache_prefixes.then(|| HashMap::with_capacity(room)),
            next_prefix_id: 1,
            counts: CacheStats::default(),
            mask: u64::MAX,
            #[cfg(test)]
            fault: None,
        }
    }

    /// Keeps so few bits of a hash that different prefixes collide.
    #[cfg(test)]
    pub(super) fn with_hash_bits(mut self, bits: u32) -> Self {
        self.mask = (1 << bits) - 1;
        self
    }

    /// Positions of a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// All blocks.
    pub fn num_blocks(&self) -> usize {
        self.total
    }

    /// Unreferenced blocks, cached ones included.
    pub fn num_free_blocks(&self) -> usize {
        self.free
    }

    /// Referenced blocks.
    pub fn num_used_blocks(&self) -> usize {
        self.total - self.free
    }

    /// References to a block.
    ///
    /// # Panics
    /// When there is no such block.
    pub fn ref_count(&self, block: u32) -> u32 {
        assert!((block as usize) < self.total, "the pool has no block {block}");
        self.blocks.get(block as usize).map_or(0, |block| block.ref_count)
    }

    /// The counters of the prefix cache.
    pub fn counts(&self) -> CacheStats {
        self.counts
    }

    /// Whether the pool caches prefixes.
    pub fn caches_prefixes(&self) -> bool {
        self.index.is_some()
    }

    /// Blocks for a number of positions.
    pub fn blocks_for(&self, positions: usize) -> usize {
        positions.div_ceil(self.block_size)
    }

    /// Takes a block for new content, or `None` when every block is in use: one without content, or else the least recently used.
    pub fn allocate(&mut self) -> Option<u32> {
        let no_empty_block = self.blocks.get(self.first as usize).is_none_or(|first| first.cached.is_some());
        let block = if no_empty_block && self.blocks.len() < self.total {
            self.allocate_new()
        } else if self.first != NONE {
            let first = self.first;
            self.unlink(first);
            self.evict(first);
            first
        } else {
            return None;
        };
        self.blocks[block as usize].ref_count = 1;
        Some(block)
    }

    /// The first block that was never allocated.
    fn allocate_new(&mut self) -> u32 {
        let block = u32::try_from(self.blocks.len()).expect("fewer than 2^32 blocks");
        self.blocks.push(Block { ref_count: 0, cached: None, before: NONE, after: NONE });
        if self.index.is_some() {
            self.tokens.resize(self.blocks.len() * self.block_size, 0);
        }
        self.free -= 1;
        block
    }

    /// Drops one reference. An unreferenced block goes to the end of the list if it is cached, and to the front if not.
    ///
    /// # Panics
    /// When the block is unreferenced.
    pub fn free(&mut self, block: u32) {
        let entry = &mut self.blocks[block as usize];
        assert!(entry.ref_count > 0, "block {block} was given back more often than taken");
        entry.ref_count -= 1;
        #[cfg(test)]
        if self.fault == Some(SchedulerBug::LeaksBlocks) {
            return;
        }
        if entry.ref_count == 0 {
            let is_cached = entry.cached.is_some();
            self.link(block, is_cached);
        }
    }

    /// The longest cached prefix of `tokens` under `root` in whole blocks: appends its blocks to `found` without taking references, and
    /// returns the id of the last.
    ///
    /// # Panics
    /// Never: what is in the index is cached.
    pub fn find_cached_prefix(&self, root: PrefixId, tokens: &[u32], found: &mut Vec<u32>) -> PrefixId {
        let mut prefix = root;
        let Some(index) = &self.index else {
            return prefix;
        };
        for chunk in tokens.chunks_exact(self.block_size) {
            let Some(&block) = index.get(&self.key(prefix, chunk)) else { break };
            let cached = self.blocks[block as usize].cached.expect("what is in the index is cached");
            let same = cached.parent == prefix && self.tokens_of(block) == chunk;
            #[cfg(test)]
            let same = same || self.fault == Some(SchedulerBug::TrustsHashes);
            if !same {
                break;
            }
            found.push(block);
            prefix = cached.prefix;
        }
        prefix
    }

    /// Takes a reference on blocks that [`find_cached_prefix`](Self::find_cached_prefix) returned.
    pub fn incref(&mut self, found: &[u32]) {
        for &block in found {
            if self.blocks[block as usize].ref_count == 0 {
                self.unlink(block);
            }
            #[cfg(test)]
            if self.fault == Some(SchedulerBug::SkipsRefcount) {
                continue;
            }
            self.blocks[block as usize].ref_count += 1;
        }
    }

    /// Counts a prompt that was looked up when it started.
    pub fn record_lookup(&mut self, queried_tokens: usize, hit_tokens: usize) {
        if self.index.is_some() {
            self.counts.queried_tokens += queried_tokens as u64;
            self.counts.hit_tokens += hit_tokens as u64;
        }
    }

    /// Caches a block that has just been filled, after the prefix `parent`; returns the prefix that ends with it. Where the same prefix is
    /// cached already, its id is returned and this block stays uncached.
    ///
    /// # Panics
    /// Never: what is in the index is cached.
    pub fn cache_block(&mut self, block: u32, parent: PrefixId, tokens: &[u32]) -> PrefixId {
        debug_assert_eq!(tokens.len(), self.block_size, "only full blocks are cached");
        let key = self.key(parent, tokens);
        let Some(index) = &self.index else {
            return PrefixId::ROOT;
        };
        if let Some(&other) = index.get(&key) {
            let cached = self.blocks[other as usize].cached.expect("what is in the index is cached");
            if cached.parent == parent && self.tokens_of(other) == tokens {
                return cached.prefix;
            }
            // The slot belongs to another prefix. A new id keeps the continuations of the two apart.
            self.counts.collisions += 1;
            return self.new_prefix_id();
        }
        let prefix = self.new_prefix_id();
        self.blocks[block as usize].cached = Some(Cached { key, parent, prefix });
        let start = block as usize * self.block_size;
        self.tokens[start..start + self.block_size].copy_from_slice(tokens);
        self.index.as_mut().expect("checked above").insert(key, block);
        prefix
    }

    /// How many of these blocks are unreferenced: taking them costs that many free blocks.
    pub fn unreferenced(&self, blocks: &[u32]) -> usize {
        blocks.iter().filter(|b| self.blocks[**b as usize].ref_count == 0).count()
    }

    fn new_prefix_id(&mut self) -> PrefixId {
        self.next_prefix_id += 1;
        PrefixId(self.next_prefix_id - 1)
    }

    fn tokens_of(&self, block: u32) -> &[u32] {
        let start = block as usize * self.block_size;
        &self.tokens[start..start + self.block_size]
    }

    /// A hash of a block after a prefix. Collisions cost hits, never correctness.
    fn key(&self, parent: PrefixId, tokens: &[u32]) -> u64 {
        // The multiplier is 2^64 over the golden ratio, odd.
        const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut state = parent.0.wrapping_add(1).wrapping_mul(FACTOR);
        for &token in tokens {
            state = (state ^ u64::from(token)).wrapping_mul(FACTOR);
            state ^= state >> 29;
        }
        state & self.mask
    }

    fn evict(&mut self, block: u32) {
        if let Some(cached) = self.blocks[block as usize].cached.take() {
            self.counts.evictions += 1;
            self.index.as_mut().expect("only a caching pool has cached blocks").remove(&cached.key);
        }
    }

    /// Takes a block out of the list of unreferenced blocks.
    fn unlink(&mut self, block: u32) {
        let Block { before, after, .. } = self.blocks[block as usize];
        match before {
            NONE => self.first = after,
            before => self.blocks[before as usize].after = after,
        }
        match after {
            NONE => self.last = before,
            after => self.blocks[after as usize].before = before,
        }
        self.free -= 1;
    }

    /// Puts a block at one end of the list of unreferenced blocks.
    fn link(&mut self, block: u32, at_end: bool) {
        let (before, after) = if at_end { (self.last, NONE) } else { (NONE, self.first) };
        let entry = &mut self.blocks[block as usize];
        (entry.before, entry.after) = (before, after);
        match before {
            NONE => self.first = block,
            before => self.blocks[before as usize].after = block,
        }
        match after {
            NONE => self.last = block,
            after => self.blocks[after as usize].before = block,
        }
        self.free += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(pool: &BlockPool, tokens: &[u32]) -> Vec<u32> {
        let mut found = Vec::new();
        pool.find_cached_prefix(PrefixId::ROOT, tokens, &mut found);
        found
    }

    /// Takes and caches the blocks of a sequence.
    fn cached(pool: &mut BlockPool, tokens: &[u32]) -> Vec<u32> {
        let mut prefix = PrefixId::ROOT;
        let chunks: Vec<Vec<u32>> = tokens.chunks_exact(pool.block_size()).map(<[u32]>::to_vec).collect();
        let mut blocks = Vec::new();
        for chunk in chunks {
            let block = pool.allocate().unwrap();
            prefix = pool.cache_block(block, prefix, &chunk);
            blocks.push(block);
        }
        blocks
    }

    fn free(pool: &mut BlockPool, blocks: &[u32]) {
        for block in blocks.iter().rev() {
            pool.free(*block);
        }
    }

    #[test]
    fn a_prefix_is_found_while_in_use_and_after() {
        let mut pool = BlockPool::new(8, 2, true);
        let blocks = cached(&mut pool, &[1, 2, 3, 4]);
        assert_eq!(found(&pool, &[1, 2, 3, 4, 5]), blocks);
        free(&mut pool, &blocks);
        assert_eq!(pool.num_free_blocks(), 8);
        assert_eq!(found(&pool, &[1, 2, 9, 9]), blocks[..1]);
        assert_eq!(found(&pool, &[3, 4]), [0_u32; 0], "the same tokens elsewhere are another prefix");
    }

    #[test]
    fn the_least_recently_used_prefix_is_evicted_from_its_end() {
        let mut pool = BlockPool::new(4, 1, true);
        let old = cached(&mut pool, &[1, 2]);
        let new = cached(&mut pool, &[7, 8]);
        free(&mut pool, &old);
        free(&mut pool, &new);
        assert_eq!(pool.allocate(), Some(old[1]));
        assert_eq!(found(&pool, &[1, 2]), old[..1]);
        // Using a prefix again makes it young.
        let hit = found(&pool, &[1]);
        pool.incref(&hit);
        free(&mut pool, &hit);
        assert_eq!(pool.allocate(), Some(new[1]));
        assert_eq!(pool.counts().evictions, 2);
    }

    #[test]
    fn blocks_without_content_are_taken_before_cached_ones() {
        let mut pool = BlockPool::new(3, 1, true);
        let kept = cached(&mut pool, &[1]);
        free(&mut pool, &kept);
        let plain = pool.allocate().unwrap();
        pool.free(plain);
        assert_eq!(pool.allocate(), Some(plain));
        assert_eq!(found(&pool, &[1]), kept);
    }

    #[test]
    fn a_shared_block_is_free_after_its_last_reference() {
        let mut pool = BlockPool::new(2, 1, true);
        let blocks = cached(&mut pool, &[5]);
        pool.incref(&blocks);
        assert_eq!(pool.ref_count(blocks[0]), 2);
        pool.free(blocks[0]);
        assert_eq!(pool.num_used_blocks(), 1);
        pool.free(blocks[0]);
        assert_eq!(pool.num_used_blocks(), 0);
    }

    #[test]
    fn the_same_tokens_under_another_adapter_are_another_prefix() {
        let mut pool = BlockPool::new(8, 2, true);
        let block = pool.allocate().unwrap();
        pool.cache_block(block, PrefixId::of(Some(0)), &[1, 2]);
        let found = |adapter| {
            let mut found = Vec::new();
            pool.find_cached_prefix(PrefixId::of(adapter), &[1, 2], &mut found);
            found.len()
        };
        assert_eq!([found(None), found(Some(0)), found(Some(1))], [0, 1, 0]);
    }

    #[test]
    fn prefixes_with_one_hash_are_told_apart() {
        let mut pool = BlockPool::new(8, 2, true).with_hash_bits(0);
        let blocks = cached(&mut pool, &[1, 2]);
        let other = cached(&mut pool, &[3, 4]);
        assert_eq!(found(&pool, &[1, 2]), blocks);
        assert!(found(&pool, &[3, 4]).is_empty(), "not cached, rather than mistaken");
        assert_eq!(pool.counts().collisions, 1);
        assert_ne!(blocks, other);
    }

    #[test]
    fn a_pool_without_a_cache_finds_nothing() {
        let mut pool = BlockPool::new(2, 1, false);
        let block = pool.allocate().unwrap();
        pool.cache_block(block, PrefixId::ROOT, &[1]);
        assert!(found(&pool, &[1]).is_empty());
        assert_eq!(pool.allocate(), Some(1));
        assert_eq!(pool.allocate(), None);
    }

    /// A pool with one list of all its blocks, front to back.
    struct Listed {
        free: std::collections::VecDeque<u32>,
        cached: Vec<bool>,
    }

    impl Listed {
        fn take(&mut self) -> Option<u32> {
            let block = self.free.pop_front()?;
            self.cached[block as usize] = false;
            Some(block)
        }

        fn free(&mut self, block: u32) {
            if self.cached[block as usize] {
                self.free.push_back(block);
            } else {
                self.free.push_front(block);
            }
        }
    }

    #[test]
    fn blocks_are_taken_as_from_one_list_of_all_of_them() {
        use rand::{Rng, SeedableRng};
        let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(7);
        for blocks in [1_u32, 2, 5, 40] {
            let mut pool = BlockPool::new(blocks as usize, 1, true);
            let mut listed = Listed { free: (0..blocks).collect(), cached: vec![false; blocks as usize] };
            let (mut taken, mut content) = (Vec::new(), 0);
            for _ in 0..2_000 {
                if random.random_range(0..5) < 3 {
                    let block = pool.allocate();
                    assert_eq!(block, listed.take());
                    let Some(block) = block else { continue };
                    if random.random() {
                        content += 1;
                        pool.cache_block(block, PrefixId::ROOT, &[content]);
                        listed.cached[block as usize] = true;
                    }
                    taken.push((block, content));
                } else if !taken.is_empty() {
                    let (block, _) = taken.swap_remove(random.random_range(0..taken.len()));
                    pool.free(block);
                    if pool.ref_count(block) == 0 {
                        listed.free(block);
                    }
                } else if let Some(&block) = found(&pool, &[random.random_range(0..=content)]).first() {
                    // A hit on an unreferenced block.
                    pool.incref(&[block]);
                    listed.free.retain(|free| *free != block);
                    taken.push((block, content));
                }
                assert_eq!((pool.num_free_blocks(), pool.num_blocks()), (listed.free.len(), blocks as usize));
            }
        }
    }

    #[test]
    fn the_size_of_a_pool_costs_nothing_until_it_is_used() {
        let mut pool = BlockPool::new(u32::MAX as usize - 1, 1 << 20, true);
        assert!(
            pool.blocks.capacity() <= 2 * PREALLOCATED_BLOCKS
                && pool.tokens.capacity() <= 2 * PREALLOCATED_TOKENS
        );
        assert_eq!((pool.allocate(), pool.allocate()), (Some(0), Some(1)));
        assert_eq!((pool.num_blocks(), pool.num_used_blocks()), (u32::MAX as usize - 1, 2));
        assert_eq!(pool.ref_count(1 << 30), 0);
    }

    #[test]
    #[should_panic(expected = "more often than taken")]
    fn freeing_twice_is_a_bug() {
        let mut pool = BlockPool::new(1, 1, false);
        let block = pool.allocate().unwrap();
        pool.free(block);
        pool.free(block);
    }
}
