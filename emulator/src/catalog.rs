//! The settings of containers that the wire itself goes by: the indexing policy and the default time to live.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use crate::service::{ContainerName, Service};
use crate::terms::Indexing;

/// Settings of one container.
#[derive(Debug)]
pub(crate) struct Settings {
    pub indexing: Indexing,
    /// Seconds; -1 leaves it to each item, none turns expiry off.
    pub default_ttl: Option<i64>,
}

/// The settings of each container, read when they are first needed.
#[derive(Debug, Default)]
pub(crate) struct Catalog {
    containers: Mutex<HashMap<ContainerName, Arc<Settings>>>,
}

impl Catalog {
    /// The settings of a container; those of a new container if there is no such one.
    pub async fn settings(&self, service: &Service, name: &ContainerName) -> Arc<Settings> {
        if let Some(known) = self.with(|containers| containers.get(name).cloned()) {
            return known;
        }
        let properties = service.read(&name.path()).await.unwrap_or_default();
        let settings = Settings {
            indexing: Indexing::of(&properties),
            default_ttl: properties.get("defaultTtl").and_then(Value::as_i64),
        };
        let settings = Arc::new(settings);
        self.with(|containers| containers.insert(name.clone(), Arc::clone(&settings)));
        settings
    }

    /// Reads the settings again when they are next needed: the structure of the account has changed.
    pub fn forget(&self) {
        self.with(HashMap::clear);
    }

    fn with<R>(&self, change: impl FnOnce(&mut HashMap<ContainerName, Arc<Settings>>) -> R) -> R {
        change(&mut self.containers.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
