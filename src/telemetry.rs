//! Metrics through the [`metrics`] facade. The application installs the recorder.
//!
//! | Name | Kind | Labels | Meaning |
//! |---|---|---|---|
//! | `duroxide_cosmos_requests_total` | counter | `operation` | requests sent to the account |
//! | `duroxide_cosmos_request_charge` | histogram | `operation` | request units of one operation |
//! | `duroxide_cosmos_throttled_total` | counter | `operation` | answers with status 429 (too many requests) |
//! | `duroxide_cosmos_retries_total` | counter | `operation` | attempts that failed transiently, including throttling |
//! | `duroxide_cosmos_claim_races_total` | counter | `queue` | claims that failed because another process had claimed the work |
//! | `duroxide_cosmos_outbox_age_seconds` | gauge | | age of the oldest undelivered message |
//! | `duroxide_cosmos_poisoned_intents_total` | counter | | messages that can't be delivered |
//! | `duroxide_cosmos_members` | gauge | | workers of this container |
//! | `duroxide_cosmos_wakeups_sent_total` | counter | | wake-ups sent to other processes |
//! | `duroxide_cosmos_unreadable_rows_total` | counter | | rows of queries that this version skipped because it can't read them |

use crate::model::Millis;
use metrics::{counter, gauge, histogram};

pub(crate) const REQUESTS: &str = "duroxide_cosmos_requests_total";
pub(crate) const CHARGE: &str = "duroxide_cosmos_request_charge";
pub(crate) const THROTTLED: &str = "duroxide_cosmos_throttled_total";
pub(crate) const RETRIES: &str = "duroxide_cosmos_retries_total";
pub(crate) const CLAIM_RACES: &str = "duroxide_cosmos_claim_races_total";
pub(crate) const OUTBOX_AGE: &str = "duroxide_cosmos_outbox_age_seconds";
pub(crate) const POISONED: &str = "duroxide_cosmos_poisoned_intents_total";
pub(crate) const MEMBERS: &str = "duroxide_cosmos_members";
pub(crate) const WAKEUPS_SENT: &str = "duroxide_cosmos_wakeups_sent_total";
pub(crate) const UNREADABLE: &str = "duroxide_cosmos_unreadable_rows_total";

/// Records an operation with the number of its requests and its charge.
pub(crate) fn operation(kind: &'static str, requests: usize, charge: f64) {
    counter!(REQUESTS, "operation" => kind).increment(requests as u64);
    histogram!(CHARGE, "operation" => kind).record(charge);
}

/// Records an attempt that failed transiently.
pub(crate) fn retry(kind: &'static str, throttled: bool) {
    counter!(RETRIES, "operation" => kind).increment(1);
    if throttled {
        counter!(THROTTLED, "operation" => kind).increment(1);
    }
}

/// Records a claim that the service refused because the document had changed.
pub(crate) fn claim_race(queue: &'static str) {
    counter!(CLAIM_RACES, "queue" => queue).increment(1);
}

/// Records the age of the oldest undelivered message. `None` means that there is none.
pub(crate) fn outbox_age(oldest: Option<Millis>, now: Millis) {
    let age = oldest.map_or(0, |oldest| now.saturating_sub(oldest));
    gauge!(OUTBOX_AGE).set(age as f64 / 1_000.0);
}

/// Records a message that can't be delivered.
pub(crate) fn poisoned_intent() {
    counter!(POISONED).increment(1);
}

/// Records the number of workers.
pub(crate) fn members(count: usize) {
    gauge!(MEMBERS).set(count as f64);
}

/// Records a wake-up that was sent to another process.
pub(crate) fn wakeup_sent() {
    counter!(WAKEUPS_SENT).increment(1);
}

/// Records a row of a query that can't be read.
pub(crate) fn unreadable() {
    counter!(UNREADABLE).increment(1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};
    use std::collections::BTreeMap;

    #[test]
    fn every_metric_reaches_the_recorder_under_its_documented_name() {
        let recorder = DebuggingRecorder::new();
        let snapshotter = recorder.snapshotter();
        metrics::with_local_recorder(&recorder, || {
            operation("batch", 2, 3.5);
            retry("batch", true);
            claim_race("orchestration");
            outbox_age(Some(1_000), 3_500);
            poisoned_intent();
            members(8);
            wakeup_sent();
            unreadable();
        });
        let seen: BTreeMap<String, DebugValue> = snapshotter
            .snapshot()
            .into_vec()
            .into_iter()
            .map(|(key, _, _, value)| (key.key().name().to_owned(), value))
            .collect();
        assert_eq!(seen[REQUESTS], DebugValue::Counter(2));
        assert_eq!(seen[THROTTLED], DebugValue::Counter(1));
        assert_eq!(seen[RETRIES], DebugValue::Counter(1));
        assert_eq!(seen[CLAIM_RACES], DebugValue::Counter(1));
        assert_eq!(seen[POISONED], DebugValue::Counter(1));
        assert_eq!(seen[OUTBOX_AGE], DebugValue::Gauge(2.5.into()));
        assert_eq!(seen[MEMBERS], DebugValue::Gauge(8.0.into()));
        assert_eq!(seen[WAKEUPS_SENT], DebugValue::Counter(1));
        assert_eq!(seen[UNREADABLE], DebugValue::Counter(1));
        assert_eq!(seen[CHARGE], DebugValue::Histogram(vec![3.5.into()]));
        let documented = include_str!("telemetry.rs");
        assert!(seen.keys().all(|name| documented.contains(&format!("| `{name}` |"))));
    }
}
