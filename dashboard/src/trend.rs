//! How the counts went over the last minutes.

use crate::Shared;
use serde::Serialize;
use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tracing::debug;

/// How often the counts are read: what one member of the fleet has worked out for all.
const EVERY: Duration = Duration::from_secs(10);
/// How many are kept: half an hour.
const MOST: usize = 180;

/// The counts at one time.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Point {
    pub(crate) at: u64,
    pub(crate) running: u64,
    pub(crate) completed: u64,
    pub(crate) failed: u64,
    /// Messages and activities that wait.
    pub(crate) waiting: u64,
}

/// The counts of the last minutes, oldest first.
#[derive(Default)]
pub(crate) struct Trend(Mutex<VecDeque<Point>>);

impl Trend {
    fn points(&self) -> std::sync::MutexGuard<'_, VecDeque<Point>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn all(&self) -> Vec<Point> {
        self.points().iter().cloned().collect()
    }

    fn add(&self, point: Point) {
        let mut points = self.points();
        if points.len() == MOST {
            points.pop_front();
        }
        points.push_back(point);
    }
}

/// Notes the counts now and then, for ever.
pub(crate) async fn follow(shared: &Shared) {
    loop {
        if let Err(error) = note(shared).await {
            debug!(error, "the counts could not be read");
        }
        tokio::time::sleep(EVERY).await;
    }
}

async fn note(shared: &Shared) -> Result<(), String> {
    let metrics = shared.client.get_system_metrics().await.map_err(|error| error.to_string())?;
    let depths = shared.client.get_queue_depths().await.map_err(|error| error.to_string())?;
    let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    shared.trend.add(Point {
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
    fn the_oldest_counts_go_first() {
        let trend = Trend::default();
        for at in 0..MOST as u64 + 5 {
            trend.add(Point { at, running: 0, completed: 0, failed: 0, waiting: 0 });
        }
        let points = trend.all();
        assert_eq!((points.len(), points[0].at, points[MOST - 1].at), (MOST, 5, MOST as u64 + 4));
    }
}
