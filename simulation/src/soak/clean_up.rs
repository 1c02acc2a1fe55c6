//! Audits and deletes ended instances during the soak, because the emulator gets slower with the documents that it
//! holds.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use duroxide::{Client, InstanceFilter};
use serde_json::Value;

use crate::audit::{self, Snapshot};
use crate::oracle::Violation;
use crate::soak::served_account::ServedAccount;
use crate::soak::state::SoakState;
use crate::soak::traffic::{ItemInstances, ItemRegistry};

/// The time between two clean-ups.
const INTERVAL: Duration = Duration::from_secs(15);
/// The age that a completed item must have. By then no operation of it should be in progress.
const AGE: Duration = Duration::from_secs(60);
/// The largest number of items that one clean-up deletes.
const MAX_ITEMS: usize = 40;
/// The time that deletions may take after the last fault.
const TIMEOUT: Duration = Duration::from_secs(60);
/// One item in this many stays until the end.
const ONE_STAYS_IN: usize = 15;

/// The clean-up worker of a soak.
pub struct CleanUp {
    /// The shared state.
    pub state: Arc<SoakState>,
    /// The account.
    pub account: Arc<ServedAccount>,
    /// A client of its own.
    pub client: Client,
    /// All workload items.
    pub registry: Arc<ItemRegistry>,
}

impl CleanUp {
    /// Cleans up until the phase of faults ends, and then finishes the deletions that it has begun.
    pub async fn run(self) {
        loop {
            self.state.sleep_while_faulty(INTERVAL).await;
            if !self.state.has_faults() {
                break;
            }
            self.audit().await;
            self.delete().await;
        }
        let timeout = Instant::now() + TIMEOUT;
        while !self.registry.being_deleted().is_empty() && Instant::now() < timeout {
            self.delete().await;
        }
        for ItemInstances { name: instance, .. } in self.registry.being_deleted() {
            let detail = format!("some of its instances still exist {TIMEOUT:?} after the last fault");
            self.state.report(Violation { invariant: "deleted instances do not exist", instance, detail });
        }
    }

    /// Audits old items, and marks those for deletion whose audit passes.
    async fn audit(&self) {
        let old = self.registry.completed_for(AGE);
        let old: Vec<ItemInstances> = old.into_iter().filter(|instances| !stays(instances)).take(MAX_ITEMS).collect();
        let mut documents = by_item(self.account.documents(), &old);
        for instances in old {
            let snapshot = Snapshot::of(documents.remove(&instances.name).unwrap_or_default());
            if self.passes(&instances, &snapshot).await {
                let count = snapshot.metrics().total_instances;
                self.registry.mark_for_deletion(&instances.name);
                self.state.summary.update(|summary| {
                    summary.orchestrations += count;
                    summary.deleted += count;
                });
            }
        }
    }

    /// Whether all instances of an item are as they must be at the end. An item that fails this audit may only be late:
    /// it stays, and the last audit reports it.
    async fn passes(&self, instances: &ItemInstances, snapshot: &Snapshot) -> bool {
        snapshot.transient_documents().is_empty()
            && snapshot.violations(&instances.expected, true).is_empty()
            && audit::outcomes(&self.client, &instances.expected).await.is_empty()
    }

    /// Deletes the items that are marked for deletion, as many of them as possible.
    async fn delete(&self) {
        let items = self.registry.being_deleted();
        let roots: Vec<String> = items.iter().flat_map(|item| item.expected.keys().cloned()).collect();
        if roots.is_empty() {
            return;
        }
        let event = format!("delete {} items with {} roots", items.len(), roots.len());
        let filter = InstanceFilter { instance_ids: Some(roots), ..InstanceFilter::default() };
        let deleted = self.client.delete_instance_bulk(filter).await;
        self.state.transcript.record("clean-up", None, format!("{event}: {deleted:?}"));
        // The answer may be an error, or lost. The audit finds the deleted items, and the next call deletes the rest.
        for item in items {
            if audit::outcomes(&self.client, &item.expected).await.is_empty() {
                self.registry.deleted(&item);
            }
        }
    }
}

/// Whether an item stays until the end, so that the last audit also sees old instances.
fn stays(item: &ItemInstances) -> bool {
    let number: usize = item.name.trim_start_matches('o').parse().unwrap_or(0);
    number.is_multiple_of(ONE_STAYS_IN)
}

/// The documents of each item.
fn by_item(documents: Vec<Value>, items: &[ItemInstances]) -> BTreeMap<String, Vec<Value>> {
    let mut found: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for document in documents {
        let instance = document["instanceId"].as_str().unwrap_or_default();
        if let Some(item) = items.iter().find(|item| item.has(instance)) {
            found.entry(item.name.clone()).or_default().push(document);
        }
    }
    found
}
