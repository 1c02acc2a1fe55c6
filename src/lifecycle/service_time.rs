//! The service's time. The clock of an operator, or of the process that retires instances, may be off by days: locks,
//! members, delays and ages are judged by the clock of the service.

use crate::{
    cosmos::{Freshness, StoreError},
    engine::Engine,
    model::{Millis, SharedResult},
};
use serde::Deserialize;
use std::time::Duration;
use tokio::{sync::Mutex, time::Instant};

/// How far the service's clock is ahead of this process's, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClockSkew(i64);

/// The skew that this process measured last.
#[derive(Default)]
struct RecentSkew(Mutex<Option<(Instant, ClockSkew)>>);

/// A measurement serves all callers within this time.
const FRESH: Duration = Duration::from_secs(5);

/// The skew, measured a few seconds ago at most. Concurrent callers share one measurement.
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
    /// When the service wrote the document, in seconds.
    #[serde(rename = "_ts")]
    at: u64,
}

impl ClockSkew {
    /// Measures it: writes a document, and reads the time that the service has given it.
    pub(crate) async fn measure(engine: &Engine) -> Result<Self, StoreError> {
        let before = engine.now();
        let kept = SharedResult::new("clock", before, ());
        engine.store.upsert(&kept.instance_id, &kept.id, &kept, None, engine.deadline()).await?;
        let freshness = Freshness::Authoritative;
        let found = engine.store.read::<Stamp>(&kept.instance_id, &kept.id, freshness, engine.deadline()).await?;
        let found = found.ok_or_else(|| StoreError::Unavailable {
            detail: "a document that tells the service's time is gone".to_owned(),
        })?;
        Ok(Self::between(before, engine.now(), found.document.at.saturating_mul(1_000)))
    }

    /// The smallest skew that explains a stamp of whole seconds, which the service wrote between two moments of this
    /// process's clock.
    fn between(before: Millis, after: Millis, stamp: Millis) -> Self {
        let signed = |millis: Millis| i64::try_from(millis).unwrap_or(i64::MAX);
        let (least, most) = (signed(stamp) - signed(after), signed(stamp) + 999 - signed(before));
        Self(0.max(least).min(most))
    }

    /// The service's time.
    pub(crate) fn now(self, engine: &Engine) -> Millis {
        engine.now().saturating_add_signed(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_of_seconds_says_no_more_than_it_knows() {
        // The service wrote it at some time from 10,000 to 10,999.
        assert_eq!(ClockSkew::between(10_100, 10_200, 10_000), ClockSkew(0));
        assert_eq!(ClockSkew::between(9_900, 9_990, 10_000), ClockSkew(10), "this clock is behind");
        assert_eq!(ClockSkew::between(9_900, 10_010, 10_000), ClockSkew(0), "or the answer took long");
        assert_eq!(ClockSkew::between(11_500, 11_600, 10_000), ClockSkew(-501), "this clock is ahead");
        assert_eq!(ClockSkew::between(3_610_500, 3_610_600, 10_000), ClockSkew(-3_599_501));
    }
}
