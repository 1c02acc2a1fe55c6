//! The settings of containers that the wire itself goes by: the indexing policy and the default time to live.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use crate::indexing::Indexing;
use crate::service::{ContainerName, Service};

/// Settings of one container.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    pub indexing: Indexing,
    /// Seconds; -1 leaves it to each item, none turns expiry off.
    pub default_ttl: Option<i64>,
}

/// The settings of each container, read when they are first needed.
#[derive(Debug, Default)]
pub(crate) struct Catalog {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    containers: HashMap<ContainerName, Arc<Settings>>,
    /// Counts the changes, so that settings are not remembered that were read before one.
    changes: u64,
}

impl Catalog {
    /// The settings of a container; those of a new container if there is no such one.
    pub async fn settings(&self, service: &Service, name: &ContainerName) -> Arc<Settings> {
        let (settings, changes) = self.with(|known| (known.containers.get(name).cloned(), known.changes));
        if let Some(settings) = settings {
            return settings;
        }
        let properties = service.read(&name.path()).await.unwrap_or_default();
        let settings = Settings {
            indexing: Indexing::of(&properties),
            default_ttl: properties.get("defaultTtl").and_then(Value::as_i64),
        };
        let settings = Arc::new(settings);
        self.with(|known| {
            if known.changes == changes {
                known.containers.insert(name.clone(), Arc::clone(&settings));
            }
        });
        settings
    }

    /// Reads the settings again when they are next needed: the structure of the account has changed.
    pub fn forget(&self) {
        self.with(|known| {
            known.containers.clear();
            known.changes += 1;
        });
    }

    fn with<R>(&self, change: impl FnOnce(&mut Known) -> R) -> R {
        change(&mut self.known.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
