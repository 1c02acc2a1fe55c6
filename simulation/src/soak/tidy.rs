//! Deletes what has ended, after a look at it: the emulator gets slower with what it holds.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use duroxide::{Client, InstanceFilter};
use serde_json::Value;

use crate::audit::{self, Inventory};
use crate::ledger::Broken;
use crate::soak::site::Site;
use crate::soak::stage::Stage;
use crate::soak::traffic::{Family, Register};

/// How often it looks.
const EVERY: Duration = Duration::from_secs(15);
/// How long an errand must be done: by then nothing of it should be under way any more.
const AGE: Duration = Duration::from_secs(60);
/// Families that are deleted at once.
const AT_ONCE: usize = 40;
/// How long it may take to delete what is left to delete, once nothing bad happens any more.
const PATIENCE: Duration = Duration::from_secs(60);
/// Of so many families one stays until the end.
const ONE_STAYS_IN: usize = 15;

/// Who tidies up.
pub struct Tidy {
    /// What is shared.
    pub stage: Arc<Stage>,
    /// The account.
    pub site: Arc<Site>,
    /// A client of its own.
    pub client: Client,
    /// Where errands are entered.
    pub register: Arc<Register>,
}

impl Tidy {
    /// Tidies up until nothing bad happens any more, and ends what it has begun.
    pub async fn keep_at_it(self) {
        loop {
            self.stage.rough_for(EVERY).await;
            if !self.stage.is_rough() {
                break;
            }
            self.condemn().await;
            self.delete().await;
        }
        let patience = Instant::now() + PATIENCE;
        while !self.register.condemned().is_empty() && Instant::now() < patience {
            self.delete().await;
        }
        for Family { name: instance, .. } in self.register.condemned() {
            let detail = format!("some of it is still there {PATIENCE:?} after nothing bad happens any more");
            self.stage.report(Broken { invariant: "what is deleted is gone", instance, detail });
        }
    }

    /// Looks at old families, and decides which of them go.
    async fn condemn(&self) {
        let old = self.register.done_since(AGE);
        let old: Vec<Family> = old.into_iter().filter(|family| !stays(family)).take(AT_ONCE).collect();
        let mut documents = by_family(self.site.documents(), &old);
        for family in old {
            let inventory = Inventory::of(documents.remove(&family.name).unwrap_or_default());
            if self.is_well(&family, &inventory).await {
                let instances = inventory.metrics().total_instances;
                self.register.condemn(&family.name);
                self.stage.tally.count(|figures| {
                    figures.orchestrations += instances;
                    figures.deleted += instances;
                });
            }
        }
    }

    /// Whether all of a family is as it must be in the end. What is not may only be late: it stays, and the last audit says.
    async fn is_well(&self, family: &Family, inventory: &Inventory) -> bool {
        inventory.passing().is_empty()
            && inventory.faults(&family.fates, true).is_empty()
            && audit::endings(&self.client, &family.fates).await.is_empty()
    }

    /// Deletes what was condemned, as much of it as can be.
    async fn delete(&self) {
        let families = self.register.condemned();
        let roots: Vec<String> = families.iter().flat_map(|family| family.fates.keys().cloned()).collect();
        if roots.is_empty() {
            return;
        }
        let told = format!("delete {} families of {} roots", families.len(), roots.len());
        let filter = InstanceFilter { instance_ids: Some(roots), ..InstanceFilter::default() };
        let deleted = self.client.delete_instance_bulk(filter).await;
        self.stage.story.tell("tidy", None, format!("{told}: {deleted:?}"));
        // Whatever the answer was, or if none came: what is gone is gone, and the rest is tried again.
        for family in families {
            if audit::endings(&self.client, &family.fates).await.is_empty() {
                self.register.deleted(&family);
            }
        }
    }
}

/// Some are there until the end, so that there are old ones too.
fn stays(family: &Family) -> bool {
    let number: usize = family.name.trim_start_matches('o').parse().unwrap_or(0);
    number.is_multiple_of(ONE_STAYS_IN)
}

/// The documents of each family.
fn by_family(documents: Vec<Value>, families: &[Family]) -> BTreeMap<String, Vec<Value>> {
    let mut found: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for document in documents {
        let instance = document["instanceId"].as_str().unwrap_or_default();
        if let Some(family) = families.iter().find(|family| family.has(instance)) {
            found.entry(family.name.clone()).or_default().push(document);
        }
    }
    found
}
