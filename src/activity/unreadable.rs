//! Activities whose document can't be read: a newer process may understand them; if none does, they fail.
//!
//! The runtime never sees such an activity, so it can't count its attempts and poison it. That is done here in its place: the
//! orchestration is told that the activity failed, instead of waiting for ever.

use super::complete;
use crate::engine::Engine;
use duroxide::{providers::WorkItem, ErrorDetails, PoisonMessageType};
use std::{sync::Arc, time::Duration};
use tracing::warn;

/// As many as duroxide's runtime gives any other item, by default.
const MAX_ATTEMPTS: u32 = 10;
/// As long as the runtime puts an unreadable history off, so that another process can take it.
const PUT_OFF: Duration = Duration::from_secs(1);

/// Gives the activity that `token` holds to others, or ends it after so many attempts. Best effort: its lock expires.
pub(super) async fn put_off_or_fail(engine: &Arc<Engine>, token: &str, attempts: u32, why: &str) {
    let Some(handle) = engine.activities.get(token).map(|entry| entry.value().clone()) else { return };
    let instance = handle.partition.instance_id().unwrap_or_default().to_owned();
    warn!(instance_id = instance, attempts, why, "an activity can't be read");
    let identity = handle.state.lock().await.identity;
    let outcome = match identity.filter(|_| attempts >= MAX_ATTEMPTS) {
        Some((execution_id, id)) => {
            let details = poisoned(&instance, execution_id, id, attempts, why);
            let failed = WorkItem::ActivityFailed { instance, execution_id, id, details };
            complete::complete(engine, token, Some(failed)).await
        }
        None => complete::abandon(engine, token, Some(PUT_OFF), false).await,
    };
    if let Err(error) = outcome {
        warn!(%error, "an activity that can't be read is looked at again when its lock expires");
    }
}

fn poisoned(instance: &str, execution_id: u64, activity_id: u64, attempt_count: u32, why: &str) -> ErrorDetails {
    ErrorDetails::Poison {
        attempt_count,
        max_attempts: MAX_ATTEMPTS,
        message_type: PoisonMessageType::Activity {
            instance: instance.to_owned(),
            execution_id,
            activity_name: "unknown".to_owned(),
            activity_id,
        },
        message: format!("the activity can't be read: {why}"),
    }
}
