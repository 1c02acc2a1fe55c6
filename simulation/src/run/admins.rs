//! Administrators: processes that run no work and delete ended instances repeatedly while the run goes on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use duroxide::providers::InstanceFilter;
use duroxide::Client;
use duroxide_cosmos::{CosmosDBProviderConfig, Retention};

use super::{Run, RunPlan};
use crate::crash_plan::CrashPoint;
use crate::deletions;
use crate::host::Host;
use crate::oracle::Violation;
use crate::worker;

/// The regions of a run with two regions. The first one is the write region.
pub(super) const REGIONS: [&str; 2] = ["East US", "West US"];

/// The plan of an administrator.
#[derive(Clone, Debug)]
pub(super) struct AdminPlan {
    pub(super) task: AdminTask,
    /// Whether it reads from the region that lags.
    pub(super) reads_lagging_region: bool,
    /// The time between two calls.
    pub(super) pause: Duration,
    /// The request at which it crashes. `None`: it does not crash.
    pub(super) crash: Option<CrashPoint>,
}

/// The call that an administrator repeats.
#[derive(Clone, Debug)]
pub(super) enum AdminTask {
    /// Applies retention to instances that ended at least this long ago.
    Retention(Duration),
    /// Deletes the ended ones of these instances, in bulk.
    Bulk(Vec<String>),
}

impl RunPlan {
    /// Whether an administrator applies retention, so that ended instances disappear.
    pub(super) fn has_retention(&self) -> bool {
        self.admins.iter().any(|admin| matches!(admin.task, AdminTask::Retention(_)))
    }
}

/// A running administrator.
pub(super) struct AdminProcess {
    pub(super) name: String,
    pub(super) host: Host,
    /// Set when it has stopped on request.
    has_stopped: Arc<AtomicBool>,
}

/// The time that an administrator may take to end its last call.
const TIMEOUT: Duration = Duration::from_secs(120);

impl Run {
    pub(super) fn start_admins(&mut self) {
        for (n, admin) in self.plan.admins.clone().into_iter().enumerate() {
            let process = self.start_admin(n, admin);
            self.admins.push(process);
        }
    }

    fn start_admin(&mut self, n: usize, admin: AdminPlan) -> AdminProcess {
        let mut config = self.config();
        if admin.reads_lagging_region {
            config = config.with_preferred_regions([REGIONS[1], REGIONS[0]]);
        }
        let name = match &admin.task {
            AdminTask::Retention(age) => {
                config = with_retention(config, *age);
                format!("{} {n}", deletions::RETENTION)
            }
            AdminTask::Bulk(_) => format!("{} {n}", deletions::BULK),
        };
        self.pending().clients.extend(admin.crash.clone().map(|crash| (name.clone(), crash)));
        let (host, has_stopped) = (Host::new(), Arc::<AtomicBool>::default());
        let (account, transcript, must_stop) =
            (self.account.clone(), self.transcript.clone(), self.admins_stop.clone());
        let (client, stopped) = (name.clone(), has_stopped.clone());
        host.handle().spawn(async move {
            let provider = Arc::new(worker::open(&account, &client, &config).await);
            let administrator = Client::new(provider.clone());
            while !must_stop.load(Ordering::Relaxed) {
                let event = match &admin.task {
                    AdminTask::Retention(_) => format!("applies retention: {:?}", provider.apply_retention().await),
                    AdminTask::Bulk(names) => {
                        let filter = InstanceFilter { instance_ids: Some(names.clone()), ..InstanceFilter::default() };
                        format!("deletes in bulk: {:?}", administrator.delete_instance_bulk(filter).await)
                    }
                };
                transcript.record(&client, None, event);
                tokio::time::sleep(admin.pause).await;
            }
            provider.shutdown_within(Duration::from_secs(20)).await;
            stopped.store(true, Ordering::Relaxed);
        });
        AdminProcess { name, host, has_stopped }
    }

    /// Asks the administrators to stop, and waits until their calls end.
    pub(super) fn wait_for_admins(&mut self) -> Result<(), Violation> {
        self.admins_stop.store(true, Ordering::Relaxed);
        let timeout = self.now + TIMEOUT;
        while let Some(admin) = self.admins.iter().find(|admin| !admin.has_stopped.load(Ordering::Relaxed)) {
            if self.now > timeout {
                let (instance, detail) = (String::new(), format!("a call of {} does not end", admin.name));
                return Err(Violation { invariant: "calls of administrators end", instance, detail });
            }
            self.step()?;
        }
        self.admins.clear();
        Ok(())
    }
}

/// A configuration that deletes every instance that ended at least `age` ago, with any status.
pub(super) fn with_retention(config: CosmosDBProviderConfig, age: Duration) -> CosmosDBProviderConfig {
    let retention = Retention::default().with_completed(age).with_failed(age).with_cancelled(age);
    config.with_retention(retention)
}
