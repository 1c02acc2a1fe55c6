//! The clean-up at the end of a run: retention deletes everything, although the workers that apply it crash.

use std::collections::BTreeMap;
use std::time::Duration;

use duroxide::providers::{InstanceFilter, ProviderAdmin};
use duroxide_cosmos::CosmosDBProviderConfig;

use super::admins::with_retention;
use super::Run;
use crate::audit;
use crate::crash_plan::CrashPoint;
use crate::deletions::CLEAN_UP;
use crate::host::Host;
use crate::oracle::Violation;
use crate::worker;

/// The lifetime of a clean-up worker that sends fewer requests than its crash point needs.
const LIFETIME: Duration = Duration::from_secs(10);
/// The time that the final clean-up worker has for everything that the others left.
const TIMEOUT: Duration = Duration::from_secs(60);

impl Run {
    /// Deletes everything that has ended. Up to three clean-up workers delete at once, and each crashes at one of its
    /// requests. A final one finishes their work, and then no document may be left.
    pub(super) fn clean_up(&mut self) -> Result<(), Violation> {
        self.transcript.record("run", None, "clean-up begins");
        self.run_clean_up_workers()?;
        let timeout = self.now + TIMEOUT;
        loop {
            let counters = self.finish_clean_up()?;
            let snapshot = self.snapshot();
            let mut violations = snapshot.transient_documents();
            violations.extend(snapshot.violations(&BTreeMap::new(), true));
            violations.extend(counters);
            match violations.into_iter().next() {
                None => return Ok(()),
                Some(violation) if self.now > timeout => return Err(violation),
                Some(_) => {}
            }
        }
    }

    /// Runs clean-up workers until all have crashed or their lifetime is over.
    fn run_clean_up_workers(&mut self) -> Result<(), Violation> {
        let count = self.rng.among(1..=3);
        let mut workers: Vec<(String, Host)> = (0..count).map(|n| self.start_clean_up_worker(n)).collect();
        let end = self.now + LIFETIME;
        while !workers.is_empty() && self.now < end {
            self.step()?;
            workers.iter_mut().for_each(|(_, host)| host.run_until(self.now));
            let pending = self.pending();
            workers.retain(|(name, _)| pending.clients.contains_key(name));
        }
        drop(workers);
        self.pending().clients.clear();
        Ok(())
    }

    fn start_clean_up_worker(&mut self, n: u64) -> (String, Host) {
        let (name, config, account) = (format!("{CLEAN_UP} {n}"), self.clean_up_config(), self.account.clone());
        let crash = CrashPoint {
            requests: self.rng.among(1..=120),
            request_arrives: self.rng.one_in(2),
            downtime: Duration::ZERO,
        };
        self.pending().clients.insert(name.clone(), crash);
        let (host, client) = (Host::new(), name.clone());
        host.handle().spawn(async move {
            let provider = worker::open(&account, &client, &config).await;
            loop {
                // This worker or another one tries again after an error.
                let _ = provider.apply_retention().await;
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        });
        (name, host)
    }

    /// Deletes the remaining instances, and compares the counters with an empty container.
    fn finish_clean_up(&mut self) -> Result<Option<Violation>, Violation> {
        let (config, account) = (self.clean_up_config(), self.account.clone());
        let had_retention = self.plan.has_retention();
        self.run_in_own_host(async move {
            let provider = worker::open(&account, &format!("final {CLEAN_UP}"), &config).await;
            // The caller sees in the snapshot which calls failed.
            let _ = provider.apply_retention().await;
            if had_retention {
                // Retention waits ten minutes before it examines a tree again that it found running.
                let _ = provider.delete_instance_bulk(InstanceFilter::default()).await;
            }
            // A child that began after the deletion of its parent belongs to no tree. An operator deletes it by its
            // name.
            let left = provider.list_instances().await.unwrap_or_default();
            for instance in &left {
                let parent = provider.get_parent_id(instance).await.ok().flatten();
                if parent.is_some_and(|parent| !left.contains(&parent)) {
                    let _ = provider.delete_instance(instance, false).await;
                }
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
            let violation = audit::counters(&provider, &audit::Snapshot::default()).await;
            let violation = violation.or(audit::losses(&provider).await);
            provider.shutdown_within(Duration::from_secs(20)).await;
            violation
        })
    }

    fn clean_up_config(&mut self) -> CosmosDBProviderConfig {
        with_retention(self.config(), Duration::ZERO)
    }
}
