//! Administrators: processes that run no work, but delete what has ended, again and again, while everything goes on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use duroxide::providers::InstanceFilter;
use duroxide::Client;
use duroxide_cosmos::{CosmosDBProviderConfig, Retention};

use super::{Plan, World};
use crate::deletions;
use crate::fate::Doom;
use crate::host::Host;
use crate::ledger::Broken;
use crate::worker;

/// The regions of a world that has two, the write region first.
pub(super) const REGIONS: [&str; 2] = ["East US", "West US"];

/// An administrator, as it is drawn.
#[derive(Clone, Debug)]
pub(super) struct Admin {
    pub(super) duty: Duty,
    /// Whether its reads go to the region that lags.
    pub(super) is_away: bool,
    /// How long it waits between two calls.
    pub(super) pause: Duration,
    /// At which of its requests it dies, if it does.
    pub(super) doom: Option<Doom>,
}

/// What an administrator does again and again.
#[derive(Clone, Debug)]
pub(super) enum Duty {
    /// Applies retention to what has ended so long ago.
    Retention(Duration),
    /// Deletes those of some instances that have ended, in bulk.
    Bulk(Vec<String>),
}

impl Plan {
    /// Whether instances may go by themselves once they have ended.
    pub(super) fn has_retention(&self) -> bool {
        self.admins.iter().any(|admin| matches!(admin.duty, Duty::Retention(_)))
    }
}

/// An administrator at work.
pub(super) struct Office {
    pub(super) name: String,
    pub(super) host: Host,
    /// Whether it has stopped, as it was told to.
    rests: Arc<AtomicBool>,
}

/// How long an administrator may take for the call that it is in when it is told to stop.
const PATIENCE: Duration = Duration::from_secs(120);

impl World {
    pub(super) fn send_admins(&mut self) {
        for (n, admin) in self.plan.admins.clone().into_iter().enumerate() {
            let office = self.send_admin(n, admin);
            self.admins.push(office);
        }
    }

    fn send_admin(&mut self, n: usize, admin: Admin) -> Office {
        let mut config = self.config();
        if admin.is_away {
            config = config.with_preferred_regions([REGIONS[1], REGIONS[0]]);
        }
        let name = match &admin.duty {
            Duty::Retention(age) => {
                config = with_retention(config, *age);
                format!("{} {n}", deletions::RETENTION)
            }
            Duty::Bulk(_) => format!("{} {n}", deletions::BULK),
        };
        self.doom().clients.extend(admin.doom.clone().map(|doom| (name.clone(), doom)));
        let (host, rests) = (Host::new(), Arc::<AtomicBool>::default());
        let (account, story, resting) = (self.account.clone(), self.story.clone(), self.resting.clone());
        let (client, is_resting) = (name.clone(), rests.clone());
        host.handle().spawn(async move {
            let provider = Arc::new(worker::open(&account, &client, &config).await);
            let administrator = Client::new(provider.clone());
            while !resting.load(Ordering::Relaxed) {
                let told = match &admin.duty {
                    Duty::Retention(_) => format!("applies retention: {:?}", provider.apply_retention().await),
                    Duty::Bulk(names) => {
                        let filter = InstanceFilter { instance_ids: Some(names.clone()), ..InstanceFilter::default() };
                        format!("deletes in bulk: {:?}", administrator.delete_instance_bulk(filter).await)
                    }
                };
                story.tell(&client, None, told);
                tokio::time::sleep(admin.pause).await;
            }
            provider.shutdown_within(Duration::from_secs(20)).await;
            is_resting.store(true, Ordering::Relaxed);
        });
        Office { name, host, rests }
    }

    /// Administrators end the calls that they are in.
    pub(super) fn until_admins_rest(&mut self) -> Result<(), Broken> {
        self.resting.store(true, Ordering::Relaxed);
        let patience = self.now + PATIENCE;
        while let Some(office) = self.admins.iter().find(|office| !office.rests.load(Ordering::Relaxed)) {
            if self.now > patience {
                let (instance, detail) = (String::new(), format!("{} does not", office.name));
                return Err(Broken { invariant: "administrators end their calls", instance, detail });
            }
            self.step()?;
        }
        self.admins.clear();
        Ok(())
    }
}

/// Whatever has ended so long ago goes, however it has ended.
pub(super) fn with_retention(config: CosmosDBProviderConfig, age: Duration) -> CosmosDBProviderConfig {
    let retention = Retention::default().with_completed(age).with_failed(age).with_cancelled(age);
    config.with_retention(retention)
}
