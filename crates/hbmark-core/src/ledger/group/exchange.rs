//! What the GPUs of a group exchange in a step, and what the link makes of it.
//!
//! Enters: a [`Stage`] of a [`Group`] and the tokens of a step. Leaves: rows of equal collectives with their bytes, priced where there is a
//! [`Link`].
//!
//! Counted as vLLM runs a layer: an all-reduce of the hidden states after each mixer and after each feed-forward, routed experts and shared
//! ones together, whole experts or slices alike; one after the embedding, whose rows are split; one of two sums a token where queries and keys
//! are normed over all heads; the logits gathered. A stage sends the hidden states of its tokens to the next.
//!
//! The price is a lower bound: the bytes that each GPU must send, at the link's speed in one direction, one after the other. Where a switch
//! adds up, an all-reduce of m bytes sends m; between n GPUs alone no less than 2(n - 1)/n · m (Patarasuk and Yuan, 2009). An all-gather sends
//! (n - 1)/n of the result: as much arrives.

use super::{Group, Stage};
use crate::model::{FeedForward, Mixer, QkNorm};
use crate::result::{CollectiveKind, CollectiveRow, Link};
use crate::units::Bytes;

/// What a step brings.
#[derive(Debug, Clone, Copy)]
pub(super) struct Traffic {
    pub tokens: usize,
    /// Rows of logits.
    pub logits: u64,
    /// Bytes of an activation.
    pub activation: u64,
}

/// The links of a group, where they are known.
#[derive(Debug, Clone, Copy)]
pub(super) struct Links {
    /// Between the GPUs of a stage.
    pub stage: Option<&'static Link>,
    /// Between all GPUs.
    pub all: Option<&'static Link>,
}

/// The collectives of one stage, without those there are none of.
pub(super) fn of_stage(
    stage: &Stage,
    group: Group,
    links: Links,
    Traffic { tokens, logits, activation }: Traffic,
) -> Vec<CollectiveRow> {
    let architecture = &stage.architecture;
    let hidden = (tokens as u64).saturating_mul(architecture.hidden_size as u64 * activation);
    let logits = logits.saturating_mul(architecture.vocab_size as u64 * activation);
    // The sums of a token's queries and keys, in f32.
    let sums = (tokens as u64).saturating_mul(8);
    let (mut blocks, mut norms) = (0, 0);
    for layer in (0..architecture.layers).map(|index| architecture.layer(index)) {
        blocks += usize::from(layer.mixer != Mixer::None);
        blocks += match layer.feed_forward {
            FeedForward::Dense(_) | FeedForward::Mixture(_) => 1,
            // Each is normed before they are added.
            FeedForward::DenseBesideMixture { .. } => 2,
            FeedForward::None => 0,
        };
        let full = |attention: crate::model::Attention| attention.qk_norm == QkNorm::FullWidth;
        norms += usize::from(matches!(layer.mixer, Mixer::Attention(attention) if full(attention)));
    }
    let split = |here: bool| usize::from(group.tensor > 1 && here);
    let (first, last) = (stage.index == 0, stage.index + 1 == group.pipeline);
    let rows = [
        (
            CollectiveKind::AllReduce,
            "hidden states after each mixer and feed-forward",
            blocks * split(true),
            hidden,
        ),
        (CollectiveKind::AllReduce, "hidden states after the embedding", split(first), hidden),
        (CollectiveKind::AllReduce, "sums for the norms of queries and keys", norms * split(true), sums),
        (CollectiveKind::AllGather, "logits", split(last), logits),
        (CollectiveKind::Send, "hidden states to the next stage", usize::from(!last), hidden),
    ];
    rows.into_iter()
        .filter(|(_, _, count, _)| *count > 0)
        .map(|(kind, what, count, bytes)| {
            // A stage sends to one GPU of the next.
            let (link, gpus) =
                if kind == CollectiveKind::Send { (links.all, 2) } else { (links.stage, group.tensor) };
            let sent_bytes = Bytes(sent(kind, bytes, group.tensor, link));
            let price = |link: &Link| sent_bytes.at(link.of_group(gpus)).0 * count as f64;
            CollectiveRow {
                kind,
                what: what.to_owned(),
                count,
                bytes: Bytes(bytes),
                sent_bytes,
                link_ns: link.map(price),
            }
        })
        .collect()
}

/// Equal collectives of all stages together.
pub(super) fn together(rows: impl IntoIterator<Item = CollectiveRow>) -> Vec<CollectiveRow> {
    let mut all: Vec<CollectiveRow> = Vec::new();
    for row in rows {
        match all.iter_mut().find(|known| known.what == row.what) {
            Some(known) => {
                known.count += row.count;
                known.link_ns = known.link_ns.zip(row.link_ns).map(|(a, b)| a + b);
            }
            None => all.push(row),
        }
    }
    all
}

/// What each of so many GPUs must send for a result of so many bytes.
pub(super) fn sent(kind: CollectiveKind, bytes: u64, gpus: usize, link: Option<&Link>) -> u64 {
    let gpus = gpus.max(1) as u64;
    let share = |times: u64| {
        let part = (u128::from(bytes) * u128::from(times)).div_ceil(u128::from(gpus));
        u64::try_from(part).unwrap_or(u64::MAX)
    };
    match kind {
        CollectiveKind::AllReduce if link.is_some_and(|link| link.reduces) => bytes,
        CollectiveKind::AllReduce => share(2 * (gpus - 1)),
        CollectiveKind::AllGather => share(gpus - 1),
        CollectiveKind::Send => bytes,
    }
}
