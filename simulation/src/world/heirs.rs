//! The last act: everything has ended, and retention takes all of it away, though those who do that die at it.

use std::collections::BTreeMap;
use std::time::Duration;

use duroxide::providers::{InstanceFilter, ProviderAdmin};
use duroxide_cosmos::CosmosDBProviderConfig;

use super::admins::with_retention;
use super::World;
use crate::audit;
use crate::fate::Doom;
use crate::host::Host;
use crate::ledger::Broken;
use crate::worker;

/// An heir that finds less to do than it was to die of is told to go.
const LIFE: Duration = Duration::from_secs(10);
/// How long the last one has for what the others have left.
const PATIENCE: Duration = Duration::from_secs(60);

impl World {
    /// Up to three at once delete what has ended, and each dies at one of its requests. Another one finishes that, and nothing is left.
    pub(super) fn take_everything_away(&mut self) -> Result<(), Broken> {
        self.story.tell("world", None, "what has ended is taken away");
        let mut heirs: Vec<(String, Host)> = (0..self.dice.among(1..=3)).map(|n| self.send_heir(n)).collect();
        let end = self.now + LIFE;
        while !heirs.is_empty() && self.now < end {
            self.step()?;
            heirs.iter_mut().for_each(|(_, host)| host.run_until(self.now));
            let doomed = self.doom();
            heirs.retain(|(name, _)| doomed.clients.contains_key(name));
        }
        drop(heirs);
        self.doom().clients.clear();
        let patience = self.now + PATIENCE;
        loop {
            let (config, account, is_put_off) = (self.heirs_config(), self.account.clone(), self.plan.has_retention());
            let counted = self.aside(async move {
                let provider = worker::open(&account, "last heir", &config).await;
                // What could not be done is seen below.
                let _ = provider.apply_retention().await;
                if is_put_off {
                    // Retention looks again after ten minutes at a tree that it found running.
                    let _ = provider.delete_instance_bulk(InstanceFilter::default()).await;
                }
                // A child that began after its parent was deleted is in no tree: an operator deletes it by its name.
                let left = provider.list_instances().await.unwrap_or_default();
                for instance in &left {
                    let parent = provider.get_parent_id(instance).await.ok().flatten();
                    if parent.is_some_and(|parent| !left.contains(&parent)) {
                        let _ = provider.delete_instance(instance, false).await;
                    }
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
                let broken = audit::counters(&provider, &audit::Inventory::default()).await;
                let broken = broken.or(audit::losses(&provider).await);
                provider.shutdown_within(Duration::from_secs(20)).await;
                broken
            })?;
            let inventory = self.inventory();
            let mut left = inventory.passing();
            left.extend(inventory.faults(&BTreeMap::new(), true));
            left.extend(counted);
            match left.into_iter().next() {
                None => return Ok(()),
                Some(broken) if self.now > patience => return Err(broken),
                Some(_) => {}
            }
        }
    }

    fn send_heir(&mut self, n: u64) -> (String, Host) {
        let (name, config, account) = (format!("heir {n}"), self.heirs_config(), self.account.clone());
        let doom = Doom { requests: self.dice.among(1..=120), arrives: self.dice.one_in(2), away: Duration::ZERO };
        self.doom().clients.insert(name.clone(), doom);
        let (host, client) = (Host::new(), name.clone());
        host.handle().spawn(async move {
            let provider = worker::open(&account, &client, &config).await;
            loop {
                // It is tried again, by this one or another.
                let _ = provider.apply_retention().await;
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        });
        (name, host)
    }

    fn heirs_config(&mut self) -> CosmosDBProviderConfig {
        with_retention(self.config(), Duration::ZERO)
    }
}
