//! Names of containers and items, from which the wire builds request paths and map keys.

use serde_json::Value;

use crate::request::{encode, Outgoing};

/// The name of a container and of its database.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ContainerName {
    pub database: String,
    pub container: String,
}

impl ContainerName {
    pub fn new(database: &str, container: &str) -> Self {
        Self { database: database.to_owned(), container: container.to_owned() }
    }

    /// Returns the container that a request addresses.
    pub fn of(request: &Outgoing) -> Option<Self> {
        match request.segments().as_slice() {
            [dbs, database, colls, container, ..] if dbs == "dbs" && colls == "colls" => {
                Some(Self { database: database.clone(), container: container.clone() })
            }
            _ => None,
        }
    }

    /// Returns the container's path.
    pub fn path(&self) -> String {
        format!("/dbs/{}/colls/{}", encode(&self.database), encode(&self.container))
    }
}

/// The key of an item in the account: container, partition key and id.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ItemKey {
    pub container: ContainerName,
    /// A JSON array, as in the request header.
    pub partition_key: String,
    pub id: String,
}

impl ItemKey {
    /// Creates a key. It normalises the partition key, because clients may write it with spaces or with escaped
    /// letters.
    pub fn new(container: ContainerName, partition_key: &str, id: &str) -> Self {
        let partition_key = match serde_json::from_str::<Value>(partition_key) {
            Ok(components) => components.to_string(),
            Err(_) => partition_key.to_owned(),
        };
        Self { container, partition_key, id: id.to_owned() }
    }

    /// Returns the item's path.
    pub fn path(&self) -> String {
        format!("{}/docs/{}", self.container.path(), encode(&self.id))
    }
}
