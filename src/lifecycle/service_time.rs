//! Cosmos DB's time. The clock of an operator's computer, or of the process that applies retention, may be off by days.
//! Therefore locks, workers, delays and ages are judged by Cosmos DB's clock.

use crate::{
    cosmos::{Freshness, StoreError},
    engine::Engine,
    model::{Millis, SharedResult},
};
use serde::Deserialize;
use std::time::Duration;
use tokio::{sync::Mutex, time::Instant};

/// The difference between Cosmos DB's clock and the clock of this process, in milliseconds. It is positive if Cosmos
/// DB's clock is ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClockSkew(i64);

/// The skew that this process measured last.
#[derive(Default)]
struct RecentSkew(Mutex<Option<(Instant, ClockSkew)>>);

/// A measurement serves all callers within this time.
const FRESH: Duration = Duration::from_secs(5);

/// The skew, measured at most 5 s ago. Concurrent callers share one measurement.
pub(crate) async fn recent_skew(engine: &Engine) -> Result<ClockSkew, StoreError> {
    let state = engine.state::<RecentSkew>();
    let mut last = state.0.lock().await;
    if let Some((_, skew)) = last.filter(|(at, _)| at.elapsed() < FRESH) {
        return Ok(skew);
    }
    let skew = ClockSkew::measure(engine).await?;
    *last = Some((Instant::now(), skew));
    Ok(skew)
}

#[derive(Deserialize)]
struct Stamp {
    /// The time when Cosmos DB wrote the document, in seconds.
    #[serde(rename = "_ts")]
    at: u64,
}

impl ClockSkew {
    /// Measures the skew: writes a document, and reads the time that Cosmos DB gave it.
    pub(crate) async fn measure(engine: &Engine) -> Result<Self, StoreError> {
        let before = engine.now();
        let document = SharedResult::new("clock", before, ());
        engine.store.upsert(&document.instance_id, &document.id, &document, None, engine.deadline()).await?;
        let freshness = Freshness::Authoritative;
        let found =
            engine.store.read::<Stamp>(&document.instance_id, &document.id, freshness, engine.deadline()).await?;
        let found = found.ok_or_else(|| StoreError::Unavailable {
            detail: "the document that shows Cosmos DB's time was deleted before it was read".to_owned(),
        })?;
        Ok(Self::between(before, engine.now(), found.document.at.saturating_mul(1_000)))
    }

    /// The smallest skew that explains a timestamp. Cosmos DB wrote the timestamp, in whole seconds, between two times
    /// of this process's clock.
    fn between(before: Millis, after: Millis, stamp: Millis) -> Self {
        let signed = |millis: Millis| i64::try_from(millis).unwrap_or(i64::MAX);
        let (least, most) = (signed(stamp) - signed(after), signed(stamp) + 999 - signed(before));
        Self(0.max(least).min(most))
    }

    /// Cosmos DB's time.
    pub(crate) fn now(self, engine: &Engine) -> Millis {
        engine.now().saturating_add_signed(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timestamp_in_seconds_gives_the_smallest_possible_skew() {
        // Cosmos DB wrote it at some time from 10,000 to 10,999.
        assert_eq!(ClockSkew::between(10_100, 10_200, 10_000), ClockSkew(0));
        assert_eq!(ClockSkew::between(9_900, 9_990, 10_000), ClockSkew(10), "this clock is behind");
        assert_eq!(ClockSkew::between(9_900, 10_010, 10_000), ClockSkew(0), "or the answer took long");
        assert_eq!(ClockSkew::between(11_500, 11_600, 10_000), ClockSkew(-501), "this clock is ahead");
        assert_eq!(ClockSkew::between(3_610_500, 3_610_600, 10_000), ClockSkew(-3_599_501));
    }
}
