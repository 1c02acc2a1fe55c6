//! Pages of instances, newest first.
//!
//! A cursor is a time, with the instances of that millisecond that were returned already. Instances can appear and
//! disappear between two pages. The cursor keeps the list from repeating or missing other instances because of that.

use crate::{
    cosmos::{queries, Rows, StoreError},
    engine::Engine,
    lifecycle::recovery::deleted_among,
    model::{status, Deleting, InstanceDocument, Millis, Partition},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{num::NonZeroU32, sync::Arc};

/// Instances that one page examines at most.
const MAX_EXAMINED: usize = 1_000;
/// The largest page.
const MAX_PAGE: usize = 1_000;

/// A selection of instances. The default selects all of them.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct InstanceQuery {
    /// Instances with this status: `Running`, `Completed`, `Failed` or `ContinuedAsNew`.
    pub status: Option<String>,
    /// Instances of this orchestration.
    pub name: Option<String>,
    /// Children of this instance.
    pub parent: Option<String>,
    /// Instances with this text in their id, ignoring case.
    pub text: Option<String>,
    /// Instances created at this time or later, in milliseconds since 1970.
    pub created_after: Option<u64>,
    /// Instances created before this time, in milliseconds since 1970.
    pub created_before: Option<u64>,
}

/// A page of instances, and the position of the next page.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct InstancePage {
    /// The instances, newest first.
    pub instances: Vec<InstanceSummary>,
    /// The cursor for the next page. The last page has none.
    pub cursor: Option<String>,
    /// Instances of this page that this version can't read.
    pub unreadable: Vec<UnreadableInstance>,
}

/// An instance whose document this version can't read. A newer version has written it, or it was changed by hand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct UnreadableInstance {
    /// The id of the instance.
    pub id: String,
    /// The reason why the document can't be read.
    pub error: String,
}

/// A summary of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct InstanceSummary {
    /// The id of the instance.
    pub id: String,
    /// The name of the orchestration.
    pub name: String,
    /// The version of the orchestration.
    pub version: String,
    /// `Running`, `Completed`, `Failed` or `ContinuedAsNew`.
    pub status: String,
    /// The parent, if another instance started this one.
    pub parent: Option<String>,
    /// The current execution.
    pub execution: u64,
    /// The time when its first turn was committed, in milliseconds since 1970.
    pub created_at: u64,
    /// The time when its last turn was committed, in milliseconds since 1970.
    pub updated_at: u64,
    /// The time when its current execution ended, in milliseconds since 1970.
    pub completed_at: Option<u64>,
}

impl InstanceSummary {
    /// Whether the instance has ended. An instance that continues as new has not: its next execution is about to begin.
    pub fn has_ended(&self) -> bool {
        status::instance_has_ended(&self.status)
    }
}

/// A row of the query.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SummaryRow {
    instance_id: Partition,
    status: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    version: String,
    #[serde(default)]
    parent: Option<String>,
    execution: u64,
    #[serde(default)]
    created_at: Millis,
    #[serde(default)]
    updated_at: Millis,
    #[serde(default)]
    completed_at: Option<Millis>,
    #[serde(default)]
    deleting: Option<Deleting>,
}

/// A row of the query, or the reason why it can't be read.
type ListedRow = Result<SummaryRow, UnreadableInstance>;

/// The position of an entry in the list.
struct ListPosition {
    instance_id: Partition,
    at: Millis,
}

/// The rows of a page in their order, including unreadable ones.
fn entries(rows: Rows<SummaryRow>) -> Vec<(ListPosition, ListedRow)> {
    let (rows, unreadable) = rows.into_parts();
    let rows = rows.into_iter().map(|row| {
        let position = ListPosition { instance_id: row.instance_id.clone(), at: row.created_at };
        (position, Ok(row))
    });
    let unreadable = unreadable.into_iter().filter_map(|found| {
        // The query orders by this time, so each row has one.
        let at = found.row.get("createdAt").and_then(Value::as_f64).unwrap_or_default() as Millis;
        let instance_id: Partition = serde_json::from_value(found.row.get("instanceId")?.clone()).ok()?;
        let id = instance_id.instance_id()?.to_owned();
        Some((ListPosition { instance_id, at }, Err(UnreadableInstance { id, error: found.error })))
    });
    let mut entries: Vec<(ListPosition, ListedRow)> = rows.chain(unreadable).collect();
    entries.sort_by_key(|(position, _)| std::cmp::Reverse(position.at));
    entries
}

/// The end of a page.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Cursor {
    /// The time of its last instance.
    at: Millis,
    /// The examined instances of that time.
    seen: Vec<Partition>,
}

impl Cursor {
    fn read(text: &str) -> Result<Self, StoreError> {
        let bytes = azure_core::base64::decode_url_safe(text).ok();
        let cursor = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        cursor.ok_or_else(|| StoreError::Malformed {
            detail: format!("{text:?} is not a cursor: pass the cursor of the previous page"),
        })
    }

    fn write(&self) -> String {
        // Numbers and strings always serialise.
        azure_core::base64::encode_url_safe(serde_json::to_vec(self).unwrap_or_default())
    }

    fn has(&self, position: &ListPosition) -> bool {
        self.at == position.at && self.seen.contains(&position.instance_id)
    }

    fn advance(&mut self, position: &ListPosition) {
        if position.at != self.at {
            *self = Self { at: position.at, seen: Vec::new() };
        }
        self.seen.push(position.instance_id.clone());
    }
}

/// Reads the page that begins at a cursor.
pub(crate) async fn page(
    engine: &Arc<Engine>,
    query: &InstanceQuery,
    cursor: Option<&str>,
    limit: usize,
) -> Result<InstancePage, StoreError> {
    let limit = limit.clamp(1, MAX_PAGE);
    let mut cursor = cursor.map(Cursor::read).transpose()?;
    let latest = query.created_before.map_or(Millis::MAX >> 11, |before| before.saturating_sub(1));
    let until = cursor.as_ref().map_or(latest, |cursor| cursor.at.min(latest));
    let statement = queries::INSTANCE_PAGE
        .statement()
        .bind("@until", until)
        .bind("@from", query.created_after.unwrap_or(0))
        .bind("@status", query.status.as_deref())
        .bind("@anyStatus", query.status.is_none())
        .bind("@name", query.name.as_deref())
        .bind("@anyName", query.name.is_none())
        .bind("@parent", query.parent.as_deref())
        .bind("@anyParent", query.parent.is_none());
    let page_size = NonZeroU32::new(u32::try_from(limit + 1).unwrap_or(u32::MAX)).unwrap_or(NonZeroU32::MIN);
    let mut pages = engine.store.container_pages::<SummaryRow>(statement.in_pages_of(page_size), engine.deadline())?;
    let text = query.text.as_deref().map(str::to_lowercase);
    let (mut found, mut unreadable, mut examined, mut more) = (Vec::new(), Vec::new(), 0, false);
    'pages: while let Some(rows) = pages.next().await? {
        for (position, entry) in entries(rows) {
            if cursor.as_ref().is_some_and(|cursor| cursor.has(&position)) {
                continue;
            }
            if found.len() == limit || examined == MAX_EXAMINED {
                more = true;
                break 'pages;
            }
            examined += 1;
            cursor.get_or_insert_default().advance(&position);
            let id = position.instance_id.instance_id().unwrap_or_default().to_lowercase();
            if text.as_ref().is_some_and(|text| !id.contains(text.as_str())) {
                continue;
            }
            match entry {
                Ok(row) => found.push(row),
                Err(instance) => unreadable.push(instance),
            }
        }
    }
    let prepared =
        found.iter().filter_map(|row: &SummaryRow| Some((row.instance_id.clone(), row.deleting.clone()?))).collect();
    let deleted = deleted_among(engine, prepared, engine.deadline()).await?;
    let instances =
        found.into_iter().filter(|row| !deleted.contains(&row.instance_id)).map(SummaryRow::summary).collect();
    Ok(InstancePage { instances, cursor: cursor.filter(|_| more).map(|cursor| cursor.write()), unreadable })
}

/// The summary of one instance.
pub(crate) async fn one(engine: &Arc<Engine>, id: &str) -> Result<Option<InstanceSummary>, StoreError> {
    let Ok(partition) = Partition::instance(id) else { return Ok(None) };
    let found = engine.read_latest(&partition, engine.deadline()).await?.map(|found| found.document);
    let Some(document) = found.filter(InstanceDocument::exists) else { return Ok(None) };
    let prepared = document.removal.deleting.iter().map(|record| (partition.clone(), record.clone())).collect();
    let deleted = deleted_among(engine, prepared, engine.deadline()).await?;
    Ok(deleted.is_empty().then(|| SummaryRow::of(document).summary()))
}

impl SummaryRow {
    fn of(document: InstanceDocument) -> Self {
        Self {
            instance_id: document.instance_id,
            status: document.current.status.unwrap_or_default(),
            name: document.current.name,
            version: document.current.version,
            parent: document.origin.parent,
            execution: document.current.execution,
            created_at: document.origin.created_at,
            updated_at: document.updated_at,
            completed_at: document.current.completed_at,
            deleting: document.removal.deleting,
        }
    }

    fn summary(self) -> InstanceSummary {
        InstanceSummary {
            id: self.instance_id.instance_id().unwrap_or_default().to_owned(),
            name: self.name,
            version: self.version,
            status: self.status,
            parent: self.parent,
            execution: self.execution,
            created_at: self.created_at,
            updated_at: self.updated_at,
            completed_at: self.completed_at,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_survives_a_round_trip_and_other_text_is_refused() {
        let cursor = Cursor { at: 17, seen: vec![Partition::instance("a/b?").unwrap()] };
        assert_eq!(Cursor::read(&cursor.write()).unwrap(), cursor);
        for text in ["", "17", "e30"] {
            let error = Cursor::read(text).unwrap_err().to_string();
            assert!(error.contains("is not a cursor"), "{error}");
        }
    }
}
