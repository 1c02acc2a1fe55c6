//! Reads instances and instance trees for deletion, pruning and listing.

use super::{recovery, Documents, Failures, Incarnation, InstanceRow};
use crate::{
    cosmos::{or_default, queries, queries::chunks_for_query, Deadline, Pages, Rows, StoreError, Versioned},
    engine::Engine,
    model::{kind, DocumentId, EventSet, InstanceDocument, Millis, Partition},
};
use duroxide::providers::{InstanceFilter, ProviderError};
use futures::{stream, StreamExt};
use serde::Deserialize;
use std::{
    collections::{BTreeSet, HashMap},
    num::NonZeroU32,
    sync::Arc,
};

/// The rows of a query for instances, including unreadable ones, for a caller that must not miss one.
fn all_rows(rows: Rows<InstanceRow>) -> Vec<InstanceRow> {
    let (mut rows, unreadable) = rows.into_parts();
    rows.extend(unreadable.iter().filter_map(InstanceRow::unreadable));
    rows
}

/// The rows of instances that exist and are not deleted.
pub(crate) async fn visible(
    engine: &Arc<Engine>,
    mut rows: Vec<InstanceRow>,
    deadline: Deadline,
) -> Result<Vec<InstanceRow>, StoreError> {
    let prepared = rows.iter().filter_map(|row| Some((row.instance_id.clone(), row.deleting.clone()?))).collect();
    let deleted = recovery::deleted_among(engine, prepared, deadline).await?;
    rows.retain(|row| row.status.is_some() && !deleted.contains(&row.instance_id));
    Ok(rows)
}

/// Reads an instance from the write region, if it exists. It does not roll forward an unfinished turn.
pub(crate) async fn latest(
    engine: &Arc<Engine>,
    instance: &str,
) -> Result<Option<Versioned<InstanceDocument>>, StoreError> {
    let Ok(partition) = Partition::instance(instance) else { return Ok(None) };
    let found = engine.read_latest(&partition, engine.deadline()).await?;
    let Some(found) = found.filter(|found| found.document.exists()) else { return Ok(None) };
    let is_gone = recovery::is_deleted(engine, &found.document, engine.deadline()).await?;
    Ok(Some(found).filter(|_| !is_gone))
}

/// A past execution.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PastExecution {
    pub(crate) execution: u64,
    pub(crate) status: String,
    #[serde(default)]
    pub(crate) ended_at: Option<Millis>,
    #[serde(default)]
    pub(crate) events: EventSet,
}

/// The children of some instances, with their parents. One query: the caller limits the number of parents.
pub(crate) async fn children(engine: &Arc<Engine>, parents: &[String]) -> Result<Vec<InstanceRow>, StoreError> {
    let statement = queries::CHILDREN.statement().bind_list("@parents", parents).authoritative();
    let (mut pages, mut children) = (engine.store.container_pages(statement, engine.per_page())?, Vec::new());
    while let Some(page) = pages.next().await? {
        children.extend(visible(engine, all_rows(page), engine.deadline()).await?);
    }
    Ok(children)
}

/// A document that depends on an instance: a child, or an undelivered message of the instance.
#[derive(Deserialize)]
pub(crate) struct Dependent {
    #[serde(rename = "type")]
    kind: String,
    #[serde(deserialize_with = "DocumentId::of_any")]
    id: DocumentId,
    /// The receiver of a message.
    #[serde(default, deserialize_with = "or_default")]
    target: Option<Partition>,
    #[serde(flatten)]
    row: InstanceRow,
}

/// One page of documents that depend on some instances.
pub(crate) struct Dependents {
    pub(crate) children: Vec<InstanceRow>,
    pub(crate) undelivered: Vec<UndeliveredMessage>,
}

/// An undelivered message of an instance. `id` is the id of its intent.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct UndeliveredMessage {
    pub(crate) sender: String,
    pub(crate) receiver: Option<Partition>,
    pub(crate) id: DocumentId,
}

/// Queries the dependents of some instances, page by page. The query reads the write region, since deletions rely on
/// it: a lagging region may not show a child, and the child would lose its parent.
pub(crate) fn dependents_pages(engine: &Engine, parents: &[String]) -> Result<Pages<Dependent>, StoreError> {
    let statement = queries::DEPENDENTS.statement().bind_list("@parents", parents).authoritative();
    engine.store.container_pages(statement, engine.per_page())
}

pub(crate) async fn next_dependents(
    engine: &Arc<Engine>,
    pages: &mut Pages<Dependent>,
) -> Result<Option<Dependents>, StoreError> {
    let Some(page) = pages.next().await? else { return Ok(None) };
    let (rows, unreadable) = page.into_parts();
    let (intents, children): (Vec<Dependent>, Vec<Dependent>) =
        rows.into_iter().partition(|dependent| dependent.kind == kind::INTENT);
    let undelivered = |intent: Dependent| {
        Some(UndeliveredMessage { sender: intent.row.parent?, receiver: intent.target, id: intent.id })
    };
    let undelivered = intents.into_iter().filter_map(undelivered).collect();
    let mut children: Vec<InstanceRow> = children.into_iter().map(|child| child.row).collect();
    children.extend(unreadable.iter().filter_map(InstanceRow::unreadable));
    let children = visible(engine, children, engine.deadline()).await?;
    Ok(Some(Dependents { children, undelivered }))
}

/// Parents per query for children.
pub(crate) const PARENTS: usize = 200;

/// Descendants of some roots, as a query returned them.
#[derive(Default)]
pub(crate) struct Seen {
    /// The documents of the first descendants.
    pub(crate) documents: Documents,
    /// The incarnation of each descendant.
    pub(crate) incarnations: HashMap<String, Incarnation>,
}

/// Several roots, each with all its descendants, parents before children. One query reads a generation of all trees.
/// `seen` receives the descendants.
pub(crate) async fn forest(
    engine: &Arc<Engine>,
    roots: &[String],
    mut seen: Option<&mut Seen>,
) -> Result<Vec<Vec<String>>, StoreError> {
    let mut trees: Vec<Vec<String>> = roots.iter().map(|root| vec![root.clone()]).collect();
    let mut tree_of: HashMap<String, usize> =
        roots.iter().enumerate().map(|(tree, root)| (root.clone(), tree)).collect();
    let mut generation = roots.to_vec();
    while !generation.is_empty() {
        let mut next = Vec::new();
        for parents in chunks_for_query(&generation, PARENTS) {
            let children = match &mut seen {
                Some(seen) => children_with_documents(engine, parents, seen).await?,
                None => children(engine, parents).await?,
            };
            for row in children {
                let Some((id, parent)) = row.id().zip(row.parent) else { continue };
                let Some(tree) = tree_of.get(&parent).copied().filter(|_| !tree_of.contains_key(&id)) else { continue };
                tree_of.insert(id.clone(), tree);
                trees[tree].push(id.clone());
                next.push(id);
            }
        }
        generation = next;
    }
    Ok(trees)
}

/// The children of some instances, with their documents.
async fn children_with_documents(
    engine: &Arc<Engine>,
    parents: &[String],
    seen: &mut Seen,
) -> Result<Vec<InstanceRow>, StoreError> {
    let statement = queries::WHOLE_CHILDREN.statement().bind_list("@parents", parents).authoritative();
    let mut pages = engine.store.container_pages(statement, engine.per_page())?;
    let mut rows = Vec::new();
    while let Some(page) = pages.next().await? {
        let page: Rows<Versioned<InstanceDocument>> = page;
        let (whole, unreadable) = page.into_parts();
        for found in whole {
            let row = InstanceRow::of(&found.document);
            if let Some(id) = row.id() {
                seen.incarnations.insert(id.clone(), row.incarnation.clone());
                seen.documents
                    .extend(Some((id, found)).filter(|_| seen.documents.len() < super::plan::MAX_CACHED_DOCUMENTS));
            }
            rows.push(row);
        }
        // The deletion reads the document before it prepares the instance, and then reports that it can't.
        rows.extend(unreadable.iter().filter_map(InstanceRow::unreadable));
    }
    visible(engine, rows, engine.deadline()).await
}

/// The limit of a filter without one. duroxide's own provider uses the same.
const DEFAULT_LIMIT: u32 = 1_000;
/// Rows that each physical partition returns at a time.
const PAGE: NonZeroU32 = NonZeroU32::new(200).unwrap();

/// The instances that a bulk operation may select, including instances of unfinished deletions. These are the instances
/// that the filter names, or the oldest ones that fit, page by page up to the filter's limit.
pub(crate) async fn candidates(
    engine: &Arc<Engine>,
    filter: &InstanceFilter,
    fits: impl Fn(&InstanceRow) -> bool,
    operation: &str,
) -> Result<Vec<InstanceRow>, ProviderError> {
    let Some(named) = &filter.instance_ids else {
        return oldest(engine, filter, fits).await.map_err(|e| e.into_provider_error(operation));
    };
    let unique: BTreeSet<&String> = named.iter().collect();
    let partitions: Vec<Partition> = unique.into_iter().filter_map(|id| Partition::instance(id).ok()).collect();
    let reading = stream::iter(partitions).map(|partition| async move {
        let found = engine.read_latest(&partition, engine.deadline()).await;
        (partition, found)
    });
    let mut reading = reading.buffered(16);
    let (mut rows, mut failures) = (Vec::new(), Failures::default());
    while let Some((partition, found)) = reading.next().await {
        match found {
            Ok(found) => rows.extend(found.map(|found| InstanceRow::of(&found.document))),
            Err(error) => {
                failures.record(partition.instance_id().unwrap_or_default(), error.into_provider_error(operation));
            }
        }
    }
    failures.into_result(!rows.is_empty(), rows)
}

async fn oldest(
    engine: &Arc<Engine>,
    filter: &InstanceFilter,
    fits: impl Fn(&InstanceRow) -> bool,
) -> Result<Vec<InstanceRow>, StoreError> {
    // A selected instance is deleted even if it runs. A lagging region may still show an ended instance with the same
    // id.
    let statement = queries::INSTANCES_TO_CLEAN.statement().in_pages_of(PAGE).authoritative();
    let mut pages = engine.store.container_pages(statement, engine.per_page())?;
    let (mut rows, mut fitting): (Vec<InstanceRow>, usize) = (Vec::new(), 0);
    while let Some(page) = pages.next().await? {
        let page: Rows<InstanceRow> = page;
        rows.extend(page.readable().into_iter().filter(|row| {
            let fits = fits(row) && matches_filter(filter, row);
            // A prepared instance may be deleted already, so it does not count towards the limit.
            fitting += usize::from(fits && row.deleting.is_none());
            fits || row.deleting.is_some()
        }));
        if fitting >= limit(filter) {
            break;
        }
    }
    Ok(rows)
}

/// Whether the filter selects an instance by the time of its end.
fn matches_filter(filter: &InstanceFilter, row: &InstanceRow) -> bool {
    filter.completed_before.is_none_or(|before| row.completed_at.is_some_and(|ended| ended < before))
}

fn limit(filter: &InstanceFilter) -> usize {
    filter.limit.unwrap_or(DEFAULT_LIMIT) as usize
}

/// The candidates that the filter selects, up to its limit, with their incarnations.
pub(crate) async fn select(
    engine: &Arc<Engine>,
    candidates: Vec<InstanceRow>,
    filter: &InstanceFilter,
    fits: impl Fn(&InstanceRow) -> bool,
) -> Result<Vec<(String, Incarnation)>, StoreError> {
    let fitting = candidates.into_iter().filter(|row| fits(row) && matches_filter(filter, row)).collect();
    let visible = visible(engine, fitting, engine.deadline()).await?;
    Ok(visible.iter().filter_map(|row| Some((row.id()?, row.incarnation.clone()))).take(limit(filter)).collect())
}
