//! Activities whose document cannot be read. A newer process may understand them. If none does, they fail.
//!
//! duroxide's runtime never sees such an activity, so it cannot count its attempts and poison it. This module does so
//! instead. The orchestration learns that the activity failed and does not wait for ever.

use super::complete;
use crate::engine::Engine;
use duroxide::{providers::WorkItem, ErrorDetails, PoisonMessageType};
use std::{sync::Arc, time::Duration};
use tracing::warn;

/// The runtime's default limit for the attempts of any other item.
const MAX_ATTEMPTS: u32 = 10;
/// The runtime's delay for an unreadable history, after which another process can claim it.
const DELAY: Duration = Duration::from_secs(1);

/// Releases the activity that `token` holds with a delay, or fails it after the last attempt. If that does not succeed,
/// its lock expires.
pub(super) async fn delay_or_fail(engine: &Arc<Engine>, token: &str, attempts: u32, why: &str) {
    let Some(handle) = engine.activities.get(token).map(|entry| entry.value().clone()) else { return };
    let instance = handle.partition.instance_id().unwrap_or_default().to_owned();
    warn!(instance_id = instance, attempts, why, "an activity cannot be read");
    let identity = handle.state.lock().await.identity;
    let outcome = match identity.filter(|_| attempts >= MAX_ATTEMPTS) {
        Some((execution_id, id)) => {
            let details = poisoned(&instance, execution_id, id, attempts, why);
            let failed = WorkItem::ActivityFailed { instance, execution_id, id, details };
            complete::complete(engine, token, Some(failed)).await
        }
        None => complete::abandon(engine, token, Some(DELAY), false).await,
    };
    if let Err(error) = outcome {
        warn!(%error, "could not release an unreadable activity, its lock will expire");
    }
}

/// The failure of an activity that could not be read in any attempt.
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
