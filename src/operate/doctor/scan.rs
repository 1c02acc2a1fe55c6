//! The scan for instances that may have a fault.

use crate::{
    cosmos::{in_background, queries, Pages, Statement, StoreError},
    engine::Engine,
    lifecycle::service_time::ClockSkew,
    model::{clock::millis, status, Millis, Partition},
    operate::list::{self, InstanceQuery},
};
use serde::Deserialize;
use std::{collections::HashSet, sync::Arc, time::Duration};

/// Instances of one page.
const PAGE: usize = 200;

/// The instances that may have a fault, page by page, each once. [`Doctor::scan`](super::Doctor::scan) creates it.
pub struct Scan {
    engine: Arc<Engine>,
    skew: ClockSkew,
    /// Running instances with progress since this time are left out.
    unmoved_since: Millis,
    all: bool,
    phase: ScanPhase,
    seen: HashSet<String>,
}

/// The source of the next page.
enum ScanPhase {
    /// Instances with an overdue message or activity.
    Overdue(Option<ScanPages>),
    /// Instances of this status, or of any, from a cursor on.
    Instances(Option<&'static str>, Option<String>),
    /// Every id that has a history, a message or an activity.
    Others(Option<ScanPages>),
    Over,
}

type ScanPages = Box<Pages<ScanRow>>;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ScanRow {
    instance_id: Partition,
}

impl Scan {
    pub(super) fn new(engine: Arc<Engine>, skew: ClockSkew, unmoved: Duration, all: bool) -> Self {
        let unmoved_since = skew.now(&engine).saturating_sub(millis(unmoved));
        Self { engine, skew, unmoved_since, all, phase: ScanPhase::Overdue(None), seen: HashSet::new() }
    }

    /// The next page, which may be empty. Returns `None` after the last page. After an error, the next call tries
    /// again.
    pub async fn next(&mut self) -> Result<Option<Vec<String>>, StoreError> {
        let phase = std::mem::replace(&mut self.phase, ScanPhase::Over);
        // `seen` keeps ids from being returned twice.
        let again = match &phase {
            ScanPhase::Over => return Ok(None),
            ScanPhase::Overdue(_) => ScanPhase::Overdue(None),
            ScanPhase::Instances(status, cursor) => ScanPhase::Instances(*status, cursor.clone()),
            ScanPhase::Others(_) => ScanPhase::Others(None),
        };
        let found = match phase {
            ScanPhase::Over => Ok(Vec::new()),
            ScanPhase::Overdue(rows) => in_background(self.overdue(rows)).await,
            ScanPhase::Instances(status, cursor) => in_background(self.instances(status, cursor)).await,
            ScanPhase::Others(rows) => in_background(self.others(rows)).await,
        };
        match found {
            Ok(found) => Ok(Some(found.into_iter().filter(|id| self.seen.insert(id.clone())).collect())),
            Err(error) => {
                self.phase = again;
                Err(error)
            }
        }
    }

    async fn overdue(&mut self, rows: Option<ScanPages>) -> Result<Vec<String>, StoreError> {
        let until = self.skew.now(&self.engine).saturating_sub(super::findings::LATE);
        let (found, rows) = next_rows(&self.engine, rows, queries::OVERDUE.statement().bind("@until", until)).await?;
        self.phase = match rows {
            Some(rows) => ScanPhase::Overdue(Some(rows)),
            None => ScanPhase::Instances((!self.all).then_some(status::RUNNING), None),
        };
        Ok(found)
    }

    async fn instances(
        &mut self,
        status: Option<&'static str>,
        cursor: Option<String>,
    ) -> Result<Vec<String>, StoreError> {
        let query = InstanceQuery { status: status.map(ToOwned::to_owned), ..InstanceQuery::default() };
        let page = list::page(&self.engine, &query, cursor.as_deref(), PAGE).await?;
        self.phase = match (page.cursor, status) {
            (Some(cursor), status) => ScanPhase::Instances(status, Some(cursor)),
            (None, Some(status::RUNNING)) => ScanPhase::Instances(Some(status::CONTINUED), None),
            (None, Some(_)) => ScanPhase::Over,
            (None, None) => ScanPhase::Others(None),
        };
        let unmoved = page.instances.into_iter().filter(|found| self.all || found.updated_at <= self.unmoved_since);
        let unreadable = page.unreadable.into_iter().map(|found| found.id);
        Ok(unmoved.map(|found| found.id).chain(unreadable).collect())
    }

    async fn others(&mut self, rows: Option<ScanPages>) -> Result<Vec<String>, StoreError> {
        let (found, rows) = next_rows(&self.engine, rows, queries::WITH_ANYTHING.statement()).await?;
        self.phase = rows.map_or(ScanPhase::Over, |rows| ScanPhase::Others(Some(rows)));
        Ok(found)
    }
}

/// The next page of a query, and the remaining pages.
async fn next_rows(
    engine: &Engine,
    rows: Option<ScanPages>,
    statement: Statement,
) -> Result<(Vec<String>, Option<ScanPages>), StoreError> {
    let deadline = engine.per_page();
    let mut rows = match rows {
        Some(rows) => rows,
        None => Box::new(engine.store.container_pages(statement, deadline)?),
    };
    let Some(page) = rows.next().await? else { return Ok((Vec::new(), None)) };
    let named = page.readable().into_iter().filter_map(|row| Some(row.instance_id.instance_id()?.to_owned()));
    Ok((named.collect(), Some(rows)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A scan can run in a spawned task.
    #[test]
    fn a_scan_can_be_spawned() {
        fn is_send<T: Send>(_: impl FnOnce(&'static mut Scan) -> T) {}
        is_send(|scan| scan.next());
    }
}
