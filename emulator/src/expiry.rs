//! Time to live. The SDK's emulator stores `ttl` and ignores it.
//!
//! An item that expires is checked when its time has come, before the next request is answered. It is deleted past the
//! wire if it is still due then: a later write may have given it more time.

use std::collections::{BTreeSet, HashMap};
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex as StdMutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use azure_core::http::{headers::HeaderName, Method};
use serde_json::Value;
use tokio::sync::Mutex;

use crate::ledger::ItemKey;
use crate::request::read_json;
use crate::service::Service;

const IF_MATCH: HeaderName = HeaderName::from_static("if-match");

/// The items that expire, by time.
#[derive(Debug)]
pub(crate) struct Expirations {
    /// When the next item is due, in Unix seconds; the largest number while none is.
    next: AtomicU64,
    queue: StdMutex<Queue>,
    /// One at a time, so that nobody sees an item that is due while another request deletes it.
    draining: Mutex<()>,
}

#[derive(Debug, Default)]
struct Queue {
    by_time: BTreeSet<(u64, ItemKey)>,
    by_item: HashMap<ItemKey, u64>,
}

/// What became of an item that was due.
enum Outcome {
    Deleted,
    Kept,
    /// It is due later, or could not be read.
    Later(u64),
}

impl Default for Expirations {
    fn default() -> Self {
        Self { next: AtomicU64::new(u64::MAX), queue: StdMutex::default(), draining: Mutex::default() }
    }
}

impl Expirations {
    /// Checks an item after its time to live, if it has one.
    pub fn schedule(&self, key: &ItemKey, default_ttl: Option<i64>, document: &Value) {
        if let Some(ttl) = lifetime(default_ttl, document) {
            self.check_at(key, now().saturating_add(ttl));
        }
    }

    /// Checks an item at this time, or earlier if an earlier check is due already.
    pub fn check_at(&self, key: &ItemKey, time: u64) {
        self.with(|queue| {
            match queue.by_item.get(key).copied() {
                Some(earlier) if earlier <= time => return,
                Some(later) => drop(queue.by_time.remove(&(later, key.clone()))),
                None => (),
            }
            queue.by_item.insert(key.clone(), time);
            queue.by_time.insert((time, key.clone()));
        });
    }

    /// Deletes what has expired and tells `deleted` of each item. `default_ttl` is that of an item's container.
    pub async fn drain<F>(&self, service: &Service, default_ttl: impl Fn(ItemKey) -> F, deleted: impl Fn(&ItemKey))
    where
        F: Future<Output = Option<i64>>,
    {
        // Accounts on which nothing expires do not even ask for the time.
        let next = self.next.load(Ordering::Acquire);
        if next == u64::MAX || next > now() {
            return;
        }
        let _alone = self.draining.lock().await;
        while let Some(key) = self.take_due() {
            match expire(service, &key, default_ttl(key.clone()).await).await {
                Outcome::Later(time) => self.check_at(&key, time),
                Outcome::Deleted => deleted(&key),
                Outcome::Kept => (),
            }
        }
    }

    /// Takes the next item that is due off the queue.
    fn take_due(&self) -> Option<ItemKey> {
        let now = now();
        self.with(|queue| {
            queue.by_time.first().filter(|(time, _)| *time <= now)?;
            let (_, key) = queue.by_time.pop_first()?;
            queue.by_item.remove(&key);
            Some(key)
        })
    }

    fn with<R>(&self, change: impl FnOnce(&mut Queue) -> R) -> R {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut queue);
        let next = queue.by_time.first().map_or(u64::MAX, |(time, _)| *time);
        self.next.store(next, Ordering::Release);
        result
    }
}

/// Deletes an item if its time is over.
async fn expire(service: &Service, key: &ItemKey, default_ttl: Option<i64>) -> Outcome {
    let again = Outcome::Later(now() + 1);
    let Some(read) = service.item_request(Method::Get, key) else { return again };
    let item = match service.forward(&read).await {
        Ok(answer) if answer.is_success() => read_json(&answer.body).unwrap_or_default(),
        Ok(answer) if answer.status == 404 => return Outcome::Kept,
        _ => return again,
    };
    match end(default_ttl, &item) {
        None => return Outcome::Kept,
        Some(time) if time > now() => return Outcome::Later(time),
        Some(_) => (),
    }
    match delete(service, key, &item).await {
        // Somebody was faster, and wrote or deleted it.
        Some(404 | 412) => Outcome::Later(now()),
        Some(status) if status < 300 => Outcome::Deleted,
        _ => again,
    }
}

async fn delete(service: &Service, key: &ItemKey, item: &Value) -> Option<u16> {
    let mut request = service.item_request(Method::Delete, key)?;
    request.headers.insert(IF_MATCH, item["_etag"].as_str().unwrap_or_default().to_owned());
    service.forward(&request).await.ok().map(|answer| answer.status)
}

/// How many seconds an item lives after its last write; none if it does not expire.
fn lifetime(default_ttl: Option<i64>, item: &Value) -> Option<u64> {
    let default = default_ttl?;
    let ttl = item.get("ttl").and_then(Value::as_i64).unwrap_or(default);
    u64::try_from(ttl).ok().filter(|ttl| *ttl > 0)
}

/// When the life of a stored item ends, in Unix seconds; none if it does not expire.
fn end(default_ttl: Option<i64>, item: &Value) -> Option<u64> {
    let ttl = lifetime(default_ttl, item)?;
    Some(item["_ts"].as_u64().unwrap_or_default().saturating_add(ttl))
}

/// Whether the life of a stored item is over.
pub(crate) fn is_over(default_ttl: Option<i64>, item: &Value) -> bool {
    end(default_ttl, item).is_some_and(|time| time <= now())
}

/// The clock by which the emulator sets `_ts`.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::service::ContainerName;

    #[test]
    fn an_items_own_time_to_live_counts_only_where_the_container_has_one() {
        let own = |ttl: i64| json!({ "id": "1", "ttl": ttl });
        assert_eq!(lifetime(None, &own(5)), None);
        assert_eq!(lifetime(Some(-1), &own(5)), Some(5));
        assert_eq!(lifetime(Some(-1), &json!({})), None);
        assert_eq!(lifetime(Some(60), &json!({})), Some(60));
        assert_eq!(lifetime(Some(60), &own(5)), Some(5));
        assert_eq!(lifetime(Some(60), &own(-1)), None);
    }

    #[test]
    fn an_item_is_checked_once_at_the_earliest_of_its_times() {
        let expirations = Expirations::default();
        let container = ContainerName::new("d", "c");
        let key = ItemKey::new(container, "[]", "1");
        assert_eq!(expirations.next.load(Ordering::Relaxed), u64::MAX);
        for time in [50, 70, 20, 30] {
            expirations.check_at(&key, time);
        }
        assert_eq!(expirations.next.load(Ordering::Relaxed), 20);
        assert_eq!(expirations.take_due(), Some(key));
        assert_eq!(expirations.take_due(), None);
        assert_eq!(expirations.next.load(Ordering::Relaxed), u64::MAX);
    }
}
