//! Cached settings of containers that the wire needs: the indexing policy and the default time to live.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use crate::indexing::Indexing;
use crate::names::ContainerName;
use crate::service::Service;

/// The settings of one container.
#[derive(Debug, Default)]
pub(crate) struct ContainerSettings {
    pub indexing: Indexing,
    /// Seconds. With -1 only items that have their own time to live expire, with `None` no items do.
    pub default_ttl: Option<i64>,
}

/// A cache of the settings of each container. A request reads them when it first needs them.
#[derive(Debug, Default)]
pub(crate) struct SettingsCache {
    cached: Mutex<CachedSettings>,
}

#[derive(Debug, Default)]
struct CachedSettings {
    containers: HashMap<ContainerName, Arc<ContainerSettings>>,
    /// Counts structural changes. Settings that were read before a change must not enter the cache after it.
    changes: u64,
}

impl SettingsCache {
    /// Returns the settings of a container. If the container does not exist, returns those of an empty definition.
    pub async fn settings(&self, service: &Service, name: &ContainerName) -> Arc<ContainerSettings> {
        let (settings, changes) = self.with(|cached| (cached.containers.get(name).cloned(), cached.changes));
        if let Some(settings) = settings {
            return settings;
        }
        let properties = service.read(&name.path()).await.unwrap_or_default();
        let settings = ContainerSettings {
            indexing: Indexing::of(&properties),
            default_ttl: properties.get("defaultTtl").and_then(Value::as_i64),
        };
        let settings = Arc::new(settings);
        self.with(|cached| {
            if cached.changes == changes {
                cached.containers.insert(name.clone(), Arc::clone(&settings));
            }
        });
        settings
    }

    /// Empties the cache after a structural change of the account.
    pub fn forget(&self) {
        self.with(|cached| {
            cached.containers.clear();
            cached.changes += 1;
        });
    }

    fn with<R>(&self, change: impl FnOnce(&mut CachedSettings) -> R) -> R {
        change(&mut self.cached.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
