//! What a server counted between two readings.

use hbmark_core::result::serving::{
    BusySteps, Dialect, GaugeOverTime, SeenSeries, ServerConfiguration, ServerMean, ServerMetrics,
    ServerSpeculation, Signal, StepBasis, Unknown, UnknownSignal,
};
use hbmark_core::units::rounded;

use super::table::{Kind, Place, TABLE};
use super::{Reading, Scrape};

/// A difference that is known to less than this share of itself is too coarse.
const MAX_ROUNDING: f64 = 0.01;
/// No server counts so far, not even operations; sums and products of smaller numbers are finite.
const LARGEST: f64 = 1e30;
/// Digits that llama.cpp prints of a number.
const LLAMA_CPP_DIGITS: i32 = 6;
/// A process start is written in seconds, and the clock behind it may be adjusted.
const SAME_START_SECONDS: f64 = 2.0;

/// The server's view of the time between the first and the last of some readings, which are in their order.
///
/// A counter that is not on the first page and is on the last one has counted from nothing: servers write some counters down with their first event.
pub(super) fn window(all: &[Scrape]) -> ServerMetrics {
    let mut view = View { all, seen: Vec::new(), unknown: Vec::new() };

    let prompt = view.count(Signal::PromptTokens);
    let cached = view.count(Signal::CachedTokens);
    let computed = view.count(Signal::ComputedTokens);
    let generation = view.count(Signal::GenerationTokens);
    let prompt_tokens = prompt.or_else(|| Some(view.concluded(Signal::PromptTokens, cached? + computed?)));
    // Both of them are counted by the step where a server has both; the sum of prompts may be counted at the end of a request.
    let hit_rate = match (cached, computed, prompt) {
        (Some(cached), Some(computed), _) => share(cached, cached + computed),
        (Some(cached), None, Some(prompt)) => share(cached, prompt),
        _ => {
            let (hits, queries) = (view.count(Signal::PrefixHits), view.count(Signal::PrefixQueries));
            hits.zip(queries).and_then(|(hits, queries)| share(hits, queries))
        }
    };
    let prompt_seconds = view.count(Signal::PromptSeconds);
    let predicted_seconds = view.count(Signal::PredictedSeconds);
    let computed_prompt_tokens =
        computed.or_else(|| Some(view.concluded(Signal::ComputedTokens, (prompt? - cached?).max(0.0))));

    ServerMetrics {
        dialect: view.after().snapshot.dialect.unwrap_or(Dialect::OpenAi),
        window_ns: nanoseconds(&all[0], view.after()),
        readings: all.len(),
        longest_reading_ns: all.iter().map(|scrape| scrape.took.as_nanos() as f64).fold(0.0, f64::max),
        broken_lines: all.iter().map(|scrape| scrape.snapshot.broken_lines).sum(),
        failures: Vec::new(),
        running: view.gauge(Signal::Running),
        waiting: view.gauge(Signal::Waiting),
        kv_use: view.gauge(Signal::KvUse),
        preemptions: view.count(Signal::Preemptions).map(rounded),
        requests: view.count(Signal::Requests).map(rounded),
        aborted_requests: view.count(Signal::AbortedRequests).map(rounded),
        prompt_tokens: prompt_tokens.map(rounded),
        computed_prompt_tokens: computed_prompt_tokens.map(rounded),
        cached_prompt_tokens: cached.map(rounded),
        generation_tokens: generation.map(rounded),
        prefix_hit_rate: hit_rate,
        ttft: view.mean(Signal::Ttft),
        e2e: view.mean(Signal::E2e),
        queue: view.mean(Signal::Queue),
        prefill: view.mean(Signal::Prefill),
        decode: view.mean(Signal::Decode),
        inference: view.mean(Signal::Inference),
        itl: view.mean(Signal::Itl),
        tpot: view.mean(Signal::Tpot),
        prompt_ns_per_token: per_token(prompt_seconds, computed),
        predicted_ns_per_token: per_token(predicted_seconds, generation),
        steps: view.count(Signal::Steps).map(rounded),
        busy_steps: view.busy_steps(),
        speculation: view.speculation(),
        estimated_read_bytes: view.count(Signal::ReadBytes),
        estimated_written_bytes: view.count(Signal::WrittenBytes),
        estimated_flops: view.count(Signal::Flops),
        configuration: view.configuration(),
        seen: view.seen,
        unknown: view.unknown,
    }
}

/// All readings of a window, and what was found in them so far.
struct View<'a> {
    all: &'a [Scrape],
    seen: Vec<SeenSeries>,
    unknown: Vec<UnknownSignal>,
}

/// A counter at one reading.
#[derive(Clone, Copy)]
enum Field {
    Number,
    Sum,
    Count,
}

impl<'a> View<'a> {
    fn after(&self) -> &'a Scrape {
        &self.all[self.all.len() - 1]
    }

    fn note(&mut self, signal: Signal, why: Unknown) {
        if !self.unknown.iter().any(|known| known.signal == signal) {
            self.unknown.push(UnknownSignal { signal, why });
        }
    }

    /// What no series says and others together do.
    fn concluded(&mut self, signal: Signal, value: f64) -> f64 {
        self.unknown.retain(|known| known.signal != signal);
        value
    }

    /// The series of a signal, by the last page; why it has none.
    fn find(&mut self, signal: Signal) -> Option<Place> {
        let place = self.after().snapshot.place(signal);
        let Some(place) = place else {
            let was_there = self.all.iter().any(|scrape| scrape.snapshot.place(signal).is_some());
            self.note(signal, if was_there { Unknown::Vanished } else { Unknown::NotExported });
            return None;
        };
        if !self.seen.iter().any(|seen| seen.signal == signal) {
            let row = &TABLE[place.row];
            let found = &row.series[place.series];
            let names = found.names.join(" + ");
            let series = match (row.kind, found.only) {
                (Kind::Label(label), _) => format!("{names}{{{label}}}"),
                (_, Some((label, values))) => format!("{names}{{{label}=~\"{}\"}}", values.join("|")),
                _ => names,
            };
            self.seen.push(SeenSeries { signal, series });
        }
        Some(place)
    }

    /// How much a counter grew.
    fn count(&mut self, signal: Signal) -> Option<f64> {
        let place = self.find(signal)?;
        match self.difference(place, Field::Number) {
            Ok(value) => Some(value),
            Err(why) => {
                self.note(signal, why);
                None
            }
        }
    }

    /// The mean of what was counted, in seconds on the page.
    fn mean(&mut self, signal: Signal) -> Option<ServerMean> {
        let place = self.find(signal)?;
        let mean = || {
            let count = self.difference(place, Field::Count)?;
            let sum = self.difference(place, Field::Sum)?;
            if count < 1.0 {
                return Err(Unknown::NothingCounted);
            }
            Ok(ServerMean { mean_ns: sum / count * 1e9, count: rounded(count) })
        };
        mean().map_err(|why| self.note(signal, why)).ok()
    }

    fn difference(&self, place: Place, field: Field) -> Result<f64, Unknown> {
        if self.restarted() {
            return Err(Unknown::Restarted);
        }
        let mut last: Option<f64> = None;
        let mut first = 0.0;
        for (at, scrape) in self.all.iter().enumerate() {
            let value = value(scrape, place, field);
            let Some(value) = value else {
                // Once there, a counter stays.
                if last.is_some() {
                    return Err(Unknown::Vanished);
                }
                continue;
            };
            if !(0.0..LARGEST).contains(&value) {
                return Err(Unknown::NotANumber);
            }
            if last.is_some_and(|last| value < last) {
                return Err(Unknown::Restarted);
            }
            if at == 0 {
                first = value;
            }
            last = Some(value);
        }
        let last = last.ok_or(Unknown::NotExported)?;
        self.exact_enough(last - first, first, last)
    }

    /// A difference of two values as printed.
    fn exact_enough(&self, difference: f64, first: f64, last: f64) -> Result<f64, Unknown> {
        let rounding = self.rounding(first) + self.rounding(last);
        if rounding > MAX_ROUNDING * difference && rounding > 0.0 && difference > 0.0
            // Nothing was seen to grow where growth would not show.
            || difference == 0.0 && rounding >= 1.0
        {
            return Err(Unknown::TooCoarse);
        }
        Ok(difference)
    }

    /// How far a number may be from its print.
    fn rounding(&self, value: f64) -> f64 {
        let whole = value.fract() == 0.0;
        if self.after().snapshot.dialect != Some(Dialect::LlamaCpp) || value == 0.0 || whole && value < 1e6 {
            return 0.0;
        }
        let digits = f64::from(LLAMA_CPP_DIGITS - 1);
        0.5 * 10f64.powf(value.log10().floor() - digits)
    }

    /// Another process than at the first reading.
    fn restarted(&self) -> bool {
        let start = |scrape: &Scrape| scrape.snapshot.number(Signal::StartTime);
        let dialect = self.all[0].snapshot.dialect;
        let first = start(&self.all[0]);
        self.all.iter().any(|scrape| {
            scrape.snapshot.dialect != dialect
                || first.zip(start(scrape)).is_some_and(|(a, b)| (a - b).abs() > SAME_START_SECONDS)
        })
    }

    /// A gauge over time.
    fn gauge(&mut self, signal: Signal) -> Option<GaugeOverTime> {
        let place = self.find(signal)?;
        let points: Vec<(&Scrape, f64)> = self
            .all
            .iter()
            .filter_map(|scrape| Some((scrape, value(scrape, place, Field::Number)?)))
            .filter(|(_, value)| value.abs() < LARGEST)
            .collect();
        let Some(((first, at_first), (last, _))) = points.first().copied().zip(points.last().copied()) else {
            self.note(signal, Unknown::NotANumber);
            return None;
        };
        let area: f64 = points
            .windows(2)
            .map(|pair| f64::midpoint(pair[0].1, pair[1].1) * nanoseconds(pair[0].0, pair[1].0))
            .sum();
        let span = nanoseconds(first, last);
        let values = points.iter().map(|(_, value)| *value);
        Some(GaugeOverTime {
            mean: if span > 0.0 { area / span } else { at_first },
            min: values.clone().fold(f64::INFINITY, f64::min),
            max: values.fold(f64::NEG_INFINITY, f64::max),
            readings: points.len(),
        })
    }

    /// Steps, where the server was busy throughout.
    fn busy_steps(&mut self) -> Option<BusySteps> {
        // A restart, and what else spoils counters, is noted there.
        self.count(Signal::Steps)?;
        let steps = self.find(Signal::Steps)?;
        self.find(Signal::Running)?;
        let engines = self.after().snapshot.engines?.count;
        let (basis, batch) = match self.after().snapshot.dialect? {
            Dialect::Vllm => (StepBasis::StepsWithOutput, Some(Signal::GenerationTokens)),
            Dialect::Sglang => (StepBasis::ForwardPasses, Some(Signal::DecodeTokens)),
            Dialect::LlamaCpp => (StepBasis::DecodeCalls, None),
            Dialect::Tgi | Dialect::TrtLlm | Dialect::OpenAi => (StepBasis::Batches, None),
        };
        let places = StepPlaces {
            steps,
            tokens: self.known(Signal::StepTokens),
            decode_steps: self.known(Signal::DecodeSteps),
            batch: batch.and_then(|signal| self.known(signal)),
            slots: self.find(Signal::BusySlots),
        };
        let busy = Busy::of(self.all, &places, engines);
        let last = value(self.after(), steps, Field::Number)?;
        let counted =
            if busy.steps < 1.0 { Err(Unknown::NotBusy) } else { self.exact_enough(busy.steps, last, last) };
        if let Err(why) = counted {
            self.note(Signal::BusySteps, why);
            return None;
        }
        let decode_steps = busy.decode_steps.unwrap_or(busy.steps);
        let per = |amount: Option<f64>, steps: f64| {
            amount
                .filter(|amount| (0.0..LARGEST).contains(amount) && steps >= 1.0)
                .map(|amount| amount / steps)
        };
        Some(BusySteps {
            basis,
            busy_ns: busy.nanoseconds,
            engines,
            min_running: busy.min_running,
            steps: rounded(busy.steps),
            // Engines step beside each other.
            mean_step_ns: busy.nanoseconds * engines as f64 / busy.steps,
            mean_step_tokens: per(busy.tokens, busy.steps),
            decode_steps: rounded(decode_steps),
            mean_batch: per(busy.batch, decode_steps),
        })
    }

    /// The series of a counter that grew soundly.
    fn known(&mut self, signal: Signal) -> Option<Place> {
        self.count(signal)?;
        self.find(signal)
    }

    fn speculation(&mut self) -> Option<ServerSpeculation> {
        let draft_tokens = self.count(Signal::DraftTokens)?;
        let accepted = self.count(Signal::AcceptedTokens)?;
        let drafts = self.count(Signal::Drafts);
        let Some(acceptance_rate) = share(accepted, draft_tokens) else {
            self.note(Signal::DraftTokens, Unknown::NothingCounted);
            return None;
        };
        Some(ServerSpeculation {
            drafts: drafts.map(rounded),
            draft_tokens: rounded(draft_tokens),
            accepted_tokens: rounded(accepted),
            acceptance_rate,
            mean_length: drafts.filter(|drafts| *drafts >= 1.0).map(|drafts| 1.0 + accepted / drafts),
        })
    }

    fn configuration(&mut self) -> ServerConfiguration {
        let mut number = |signal| {
            let place = self.find(signal)?;
            value(self.after(), place, Field::Number).filter(|value| (0.0..LARGEST).contains(value))
        };
        let (kv_blocks, block_tokens) = (number(Signal::KvBlocks), number(Signal::BlockTokens));
        let (kv_tokens, max_model_len) = (number(Signal::KvTokens), number(Signal::MaxModelLen));
        let prefix_caching = number(Signal::PrefixCaching);
        let kv_tokens =
            kv_tokens.or_else(|| Some(self.concluded(Signal::KvTokens, kv_blocks? * block_tokens?)));
        ServerConfiguration {
            kv_blocks: kv_blocks.map(rounded),
            block_tokens: block_tokens.map(rounded),
            kv_tokens: kv_tokens.map(rounded),
            max_model_len: max_model_len.map(rounded),
            prefix_caching: prefix_caching.map(|value| value > 0.0),
        }
    }
}

/// The series that tell of steps.
struct StepPlaces {
    steps: Place,
    tokens: Option<Place>,
    decode_steps: Option<Place>,
    /// Tokens that came out of steps, counted by the step.
    batch: Option<Place>,
    /// Requests in a step, the mean of all steps so far.
    slots: Option<Place>,
}

/// What was counted in busy time; none where a series is missing.
struct Busy {
    nanoseconds: f64,
    min_running: f64,
    steps: f64,
    tokens: Option<f64>,
    decode_steps: Option<f64>,
    batch: Option<f64>,
}

impl Busy {
    fn of(all: &[Scrape], places: &StepPlaces, engines: usize) -> Self {
        let least = |scrape: &Scrape| {
            let found = scrape.snapshot.engines.filter(|found| found.count == engines)?;
            (1.0..LARGEST).contains(&found.least_running).then_some(found.least_running)
        };
        let pairs: Vec<(&Scrape, &Scrape, f64)> = all
            .windows(2)
            .filter_map(|pair| Some((&pair[0], &pair[1], least(&pair[0])?.min(least(&pair[1])?))))
            .collect();
        // A counter that is not there yet has counted nothing.
        let at = |scrape, place| value(scrape, place, Field::Number).unwrap_or(0.0);
        let growth = |place: Place| pairs.iter().map(|(a, b, _)| at(b, place) - at(a, place)).sum::<f64>();
        let slots = |place: Place| {
            let so_far = |scrape| at(scrape, place) * at(scrape, places.steps);
            pairs.iter().map(|(a, b, _)| so_far(b) - so_far(a)).sum()
        };
        Self {
            nanoseconds: pairs.iter().map(|(a, b, _)| nanoseconds(a, b)).sum(),
            min_running: pairs.iter().map(|(_, _, least)| *least).fold(f64::INFINITY, f64::min),
            steps: growth(places.steps),
            tokens: places.tokens.map(growth),
            decode_steps: places.decode_steps.map(growth),
            batch: places.batch.map(growth).or_else(|| places.slots.map(slots)),
        }
    }
}

fn value(scrape: &Scrape, place: Place, field: Field) -> Option<f64> {
    match (scrape.snapshot.readings.get(&place)?, field) {
        (Reading::Number(value), Field::Number) => Some(*value),
        (Reading::Total { sum, .. }, Field::Sum) => Some(*sum),
        (Reading::Total { count, .. }, Field::Count) => Some(*count),
        _ => None,
    }
}

fn nanoseconds(from: &Scrape, to: &Scrape) -> f64 {
    to.at.saturating_duration_since(from.at).as_nanos() as f64
}

fn share(part: f64, all: f64) -> Option<f64> {
    (all > 0.0).then(|| part / all)
}

fn per_token(seconds: Option<f64>, tokens: Option<f64>) -> Option<f64> {
    let (seconds, tokens) = (seconds?, tokens?);
    (tokens >= 1.0).then(|| seconds / tokens * 1e9)
}
