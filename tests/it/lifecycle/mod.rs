//! Deletion, pruning, retention, counters and shutdown.

mod bulk_deletion;
mod counters;
mod deletion;
mod deletion_crashes;
mod deletion_pending_messages;
mod deletion_races;
mod deletion_size;
mod deletion_timing;
mod pruning;
mod queued_starts;
mod retention;
mod retention_clocks;
mod shutdown;

use crate::fixture::*;
use duroxide::providers::{ExecutionMetadata, InstanceFilter, Provider};
use duroxide_cosmos::CosmosDBProvider;
use futures::future;
use serde_json::Value;
use std::future::Future;

/// Makes an ended root with so many ended children, whose names have so many bytes. The root comes first in the result.
pub async fn make_tree(
    fixture: &Fixture,
    provider: &CosmosDBProvider,
    root: &str,
    children: usize,
    bytes: usize,
) -> Vec<String> {
    let name = |n: usize| format!("{root}/{n:0>width$}", width = bytes.saturating_sub(root.len() + 1));
    finish(provider, root, None).await;
    finish(provider, &name(0), Some(root)).await;
    fixture.copy_instance(&name(0), (1..children).map(name)).await;
    std::iter::once(root.to_owned()).chain((0..children).map(name)).collect()
}

/// Runs all futures on every core.
pub async fn all_at_once<F>(runs: impl Iterator<Item = F>) -> Vec<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    future::try_join_all(runs.map(tokio::spawn)).await.expect("no panic")
}

/// The number of instances in the container, and all other documents that are left in it.
pub async fn left(fixture: &Fixture) -> (usize, Vec<String>) {
    let documents = fixture.documents().await;
    let (instances, others): (Vec<_>, Vec<_>) = documents.into_iter().partition(|d| d["type"] == "instance");
    let lasting = ["counters", "format", "member", "wakeup"];
    // A process that aborts a deletion has asked for the time of Cosmos DB and stored it.
    let is_lasting = |d: &&Value| lasting.iter().any(|kind| d["type"] == *kind) || d["id"] == "sharedResult:clock";
    let others = others.iter().filter(|d| !is_lasting(d));
    (instances.len(), others.map(|d| format!("{} in {}", d["id"], d["instanceId"])).collect())
}

pub async fn assert_nothing_left(fixture: &Fixture, case: &str) {
    let (instances, others) = left(fixture).await;
    assert!(instances == 0 && others.is_empty(), "{case}: {instances} instances and {others:?}");
}

pub fn everything(limit: u32) -> InstanceFilter {
    InstanceFilter { limit: Some(limit), ..InstanceFilter::default() }
}

/// Makes ended instances `i0` and so on.
pub async fn many_instances(fixture: &Fixture, provider: &CosmosDBProvider, count: usize) {
    finish(provider, "i0", None).await;
    fixture.copy_instance("i0", (1..count).map(|n| format!("i{n}"))).await;
}

pub fn of_parent(metadata: ExecutionMetadata) -> ExecutionMetadata {
    ExecutionMetadata { parent_instance_id: Some("parent".to_owned()), ..metadata }
}

/// Makes a parent that has completed, and its child between two executions.
pub async fn live_tree(provider: &dyn Provider) {
    begin(provider, "parent", Vec::new(), vec![start_child("child", Some("parent"))]).await;
    let (item, token, _) = next_turn(provider, LONG).await;
    assert_eq!(item.instance, "child");
    // The message for the next execution comes later, so that the child stays between the two.
    let events = vec![started("child", 1), completed("child", 1, 2)];
    commit(provider, &token, events, Vec::new(), Vec::new(), of_parent(ended("ContinuedAsNew"))).await.unwrap();
    provider.enqueue_for_orchestrator(external("parent", "enough"), None).await.unwrap();
    let (_, token, _) = next_turn(provider, LONG).await;
    let events = vec![completed("parent", 1, 2)];
    commit(provider, &token, events, Vec::new(), Vec::new(), ended("Completed")).await.unwrap();
}
