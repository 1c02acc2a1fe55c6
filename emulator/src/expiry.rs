//! Expiry of items after their time to live. The SDK's emulator stores `ttl` and ignores it.
//!
//! When an item's time has come, the next request checks it before it is answered. The check deletes the item,
//! bypassing the wire, if the item has expired. A later write may have extended its time.

use std::collections::{BTreeSet, HashMap};
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex as StdMutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use azure_core::http::{headers::HeaderName, Method};
use serde_json::Value;
use tokio::sync::Mutex;

use crate::names::ItemKey;
use crate::request::read_json;
use crate::service::Service;

const IF_MATCH: HeaderName = HeaderName::from_static("if-match");

/// The items with a time to live, by the time of their next check.
#[derive(Debug)]
pub(crate) struct Expirations {
    /// When the next item is due, in Unix seconds. `u64::MAX` if no item is due.
    next: AtomicU64,
    queue: StdMutex<ExpiryQueue>,
    /// Serialises expiry. Otherwise a request could see an expired item while another request deletes it.
    drain_lock: Mutex<()>,
}

#[derive(Debug, Default)]
struct ExpiryQueue {
    by_time: BTreeSet<(u64, ItemKey)>,
    by_item: HashMap<ItemKey, u64>,
}

/// The result of checking an item that was due.
enum ExpiryResult {
    Deleted,
    NotExpired,
    /// The item is due at this time, or could not be read and is checked again then.
    Later(u64),
}

impl Default for Expirations {
    fn default() -> Self {
        Self { next: AtomicU64::new(u64::MAX), queue: StdMutex::default(), drain_lock: Mutex::default() }
    }
}

impl Expirations {
    /// Schedules a check of an item after its time to live, if it has one.
    pub fn schedule(&self, key: &ItemKey, default_ttl: Option<i64>, document: &Value) {
        if let Some(ttl) = seconds_to_live(default_ttl, document) {
            self.check_at(key, now().saturating_add(ttl));
        }
    }

    /// Schedules a check of an item at this time. An earlier scheduled check remains.
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

    /// Deletes expired items and calls `deleted` for each. `default_ttl` returns the default of an item's container.
    pub async fn drain<F>(&self, service: &Service, default_ttl: impl Fn(ItemKey) -> F, deleted: impl Fn(&ItemKey))
    where
        F: Future<Output = Option<i64>>,
    {
        // An account without expiring items does not read the clock.
        let next = self.next.load(Ordering::Acquire);
        if next == u64::MAX || next > now() {
            return;
        }
        let _guard = self.drain_lock.lock().await;
        while let Some(key) = self.take_due() {
            match expire(service, &key, default_ttl(key.clone()).await).await {
                ExpiryResult::Later(time) => self.check_at(&key, time),
                ExpiryResult::Deleted => deleted(&key),
                ExpiryResult::NotExpired => (),
            }
        }
    }

    /// Removes the next due item from the queue and returns it.
    fn take_due(&self) -> Option<ItemKey> {
        let now = now();
        self.with(|queue| {
            queue.by_time.first().filter(|(time, _)| *time <= now)?;
            let (_, key) = queue.by_time.pop_first()?;
            queue.by_item.remove(&key);
            Some(key)
        })
    }

    fn with<R>(&self, change: impl FnOnce(&mut ExpiryQueue) -> R) -> R {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut queue);
        let next = queue.by_time.first().map_or(u64::MAX, |(time, _)| *time);
        self.next.store(next, Ordering::Release);
        result
    }
}

/// Deletes an item if it has expired.
async fn expire(service: &Service, key: &ItemKey, default_ttl: Option<i64>) -> ExpiryResult {
    let again = ExpiryResult::Later(now() + 1);
    let Some(read) = service.item_request(Method::Get, key) else { return again };
    let item = match service.forward(&read).await {
        Ok(answer) if answer.is_success() => read_json(&answer.body).unwrap_or_default(),
        Ok(answer) if answer.status == 404 => return ExpiryResult::NotExpired,
        _ => return again,
    };
    match expires_at(default_ttl, &item) {
        None => return ExpiryResult::NotExpired,
        Some(time) if time > now() => return ExpiryResult::Later(time),
        Some(_) => (),
    }
    match delete(service, key, &item).await {
        // Another request has written or deleted the item meanwhile.
        Some(404 | 412) => ExpiryResult::Later(now()),
        Some(status) if status < 300 => ExpiryResult::Deleted,
        _ => again,
    }
}

async fn delete(service: &Service, key: &ItemKey, item: &Value) -> Option<u16> {
    let mut request = service.item_request(Method::Delete, key)?;
    request.headers.insert(IF_MATCH, item["_etag"].as_str().unwrap_or_default().to_owned());
    service.forward(&request).await.ok().map(|answer| answer.status)
}

/// Returns how many seconds after its last write an item expires, or `None` if it does not expire.
fn seconds_to_live(default_ttl: Option<i64>, item: &Value) -> Option<u64> {
    let default = default_ttl?;
    let ttl = item.get("ttl").and_then(Value::as_i64).unwrap_or(default);
    u64::try_from(ttl).ok().filter(|ttl| *ttl > 0)
}

/// Returns when a stored item expires, in Unix seconds, or `None` if it does not expire.
fn expires_at(default_ttl: Option<i64>, item: &Value) -> Option<u64> {
    let ttl = seconds_to_live(default_ttl, item)?;
    Some(item["_ts"].as_u64().unwrap_or_default().saturating_add(ttl))
}

/// Whether a stored item has expired.
pub(crate) fn is_expired(default_ttl: Option<i64>, item: &Value) -> bool {
    expires_at(default_ttl, item).is_some_and(|time| time <= now())
}

/// Returns the time in Unix seconds, by the same clock as the emulator's `_ts`.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::names::ContainerName;

    #[test]
    fn an_items_own_time_to_live_applies_only_if_the_container_has_a_default() {
        let own = |ttl: i64| json!({ "id": "1", "ttl": ttl });
        assert_eq!(seconds_to_live(None, &own(5)), None);
        assert_eq!(seconds_to_live(Some(-1), &own(5)), Some(5));
        assert_eq!(seconds_to_live(Some(-1), &json!({})), None);
        assert_eq!(seconds_to_live(Some(60), &json!({})), Some(60));
        assert_eq!(seconds_to_live(Some(60), &own(5)), Some(5));
        assert_eq!(seconds_to_live(Some(60), &own(-1)), None);
    }

    #[test]
    fn an_item_is_checked_once_at_its_earliest_time() {
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
