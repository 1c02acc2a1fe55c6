//! The counts of the last half hour.

use crate::Shared;
use serde::Serialize;
use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tracing::debug;

/// The interval between two reads of the counts. The workers compute these figures for their metrics, and share them.
const INTERVAL: Duration = Duration::from_secs(10);
/// The number of points: half an hour.
const MAX_POINTS: usize = 180;

/// The counts at one time.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TrendPoint {
    pub(crate) at: u64,
    pub(crate) running: u64,
    pub(crate) completed: u64,
    pub(crate) failed: u64,
    /// Waiting messages and activities.
    pub(crate) waiting: u64,
}

/// The points of the last half hour, oldest first.
#[derive(Default)]
pub(crate) struct Trend(Mutex<VecDeque<TrendPoint>>);

impl Trend {
    fn points(&self) -> std::sync::MutexGuard<'_, VecDeque<TrendPoint>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn all(&self) -> Vec<TrendPoint> {
        self.points().iter().cloned().collect()
    }

    fn add(&self, point: TrendPoint) {
        let mut points = self.points();
        if points.len() == MAX_POINTS {
            points.pop_front();
        }
        points.push_back(point);
    }
}

/// Records the counts at each interval. It never returns.
pub(crate) async fn record(shared: &Shared) {
    loop {
        if let Err(error) = add_point(shared).await {
            debug!(error, "the counts could not be read");
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

async fn add_point(shared: &Shared) -> Result<(), String> {
    let metrics = shared.client.get_system_metrics().await.map_err(|error| error.to_string())?;
    let depths = shared.client.get_queue_depths().await.map_err(|error| error.to_string())?;
    let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    shared.trend.add(TrendPoint {
        at: u64::try_from(at.as_millis()).unwrap_or(u64::MAX),
        running: metrics.running_instances,
        completed: metrics.completed_instances,
        failed: metrics.failed_instances,
        waiting: (depths.orchestrator_queue + depths.worker_queue) as u64,
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_trend_drops_its_oldest_point() {
        let trend = Trend::default();
        for at in 0..MAX_POINTS as u64 + 5 {
            trend.add(TrendPoint { at, running: 0, completed: 0, failed: 0, waiting: 0 });
        }
        let points = trend.all();
        let expected = (MAX_POINTS, 5, MAX_POINTS as u64 + 4);
        assert_eq!((points.len(), points[0].at, points[MAX_POINTS - 1].at), expected);
    }
}
