//! Compares charges with Microsoft's published prices, in RU.
//!
//! The prices are from Microsoft's article "Understand request unit consumption" of 2026. They are not measured on
//! Azure. Documents up to about 32 KB cost nearly the same. A replace costs two creates. Each indexed term that is
//! added or removed costs 0.2.

use super::{done, text, DeepCheck, DeepCheckResult};
use crate::cosmos::OperationKind;
use serde_json::Value;
use std::future::Future;

/// Sizes in bytes, with the published prices of a read and a create.
const PUBLISHED: [(usize, f64, f64); 2] = [(1_024, 1.00, 4.95), (16 * 1_024, 1.67, 9.52)];
const DELETE: f64 = 4.95;
const TERM: f64 = 0.2;
/// The indexed terms of a document of this check: its type and its creation time.
const TERMS: f64 = 2.0;
/// The lowest price of a query for each physical partition.
const QUERY: f64 = 2.3;
/// The accepted relative deviation of a charge from the published price.
const TOLERANCE: f64 = 0.35;

impl DeepCheck<'_> {
    pub(super) async fn prices(&mut self) {
        let consequence = "the cost estimates of the documentation do not hold on this account";
        for (bytes, read, create) in PUBLISHED {
            let outcome = self.charges(bytes, read, create).await;
            self.report(&format!("prices at {} KB", bytes / 1_024), outcome, consequence);
        }
        let outcome = self.query_charge().await;
        self.report("price of a query", outcome, consequence);
    }

    async fn charges(&self, bytes: usize, read: f64, create: f64) -> DeepCheckResult {
        let (store, partition) = (self.store, &self.partition);
        let name = format!("price-{bytes}");
        let (id, document) = (self.id(&name), self.document(&name, 1, bytes));
        let terms = TERM * TERMS;
        let creating = async { self.create(&name, &document).await.map(drop) };
        let created = self.charge(OperationKind::Create, creating).await?;
        let reading = async {
            let freshness = crate::cosmos::Freshness::Session;
            store.read::<Value>(partition, &id, freshness, self.deadline()).await.map(drop).map_err(text)
        };
        let was_read = self.charge(OperationKind::Read, reading).await?;
        let replacing =
            async { done(store.replace(partition, &id, &document, None, self.deadline()).await, "").map(drop) };
        let replaced = self.charge(OperationKind::Replace, replacing).await?;
        let deleting = async { done(store.delete(partition, &id, None, self.deadline()).await, "").map(drop) };
        let deleted = self.charge(OperationKind::Delete, deleting).await?;
        compare(&[
            ("create", created, create + terms),
            ("read", was_read, read),
            ("replace", replaced, create * 2.0),
            ("delete", deleted, DELETE + terms),
        ])
    }

    async fn query_charge(&self) -> DeepCheckResult {
        let asking = async {
            let statement = crate::cosmos::queries::VALUES.statement();
            self.store
                .query_partition::<Value>(&self.partition, statement, self.deadline())
                .await
                .map(drop)
                .map_err(text)
        };
        let kind = OperationKind::PartitionQuery;
        let before = self.store.statistics().of(kind).requests;
        let charge = self.charge(kind, asking).await?;
        let pages = self.store.statistics().of(kind).requests - before;
        // An empty page costs as much as any other.
        let charge = charge / pages.max(1) as f64;
        let observation = format!("{charge:.2} RU for an empty page, published at least {QUERY}");
        if (QUERY * (1.0 - TOLERANCE)..QUERY * 2.0).contains(&charge) {
            Ok(observation)
        } else {
            Err(observation)
        }
    }

    /// Returns the charge of a call of this kind.
    async fn charge(&self, kind: OperationKind, call: impl Future<Output = Result<(), String>>) -> Result<f64, String> {
        let before = self.store.statistics().of(kind).charge;
        call.await?;
        Ok(self.store.statistics().of(kind).charge - before)
    }
}

/// Compares charges with published prices.
fn compare(charges: &[(&str, f64, f64)]) -> DeepCheckResult {
    let texts: Vec<String> =
        charges.iter().map(|(what, charged, published)| format!("{what} {charged:.2} ({published:.2})")).collect();
    let observation = format!("charged (published): {}", texts.join(", "));
    let is_near = |(_, charged, published): &(&str, f64, f64)| (charged - published).abs() <= published * TOLERANCE;
    if charges.iter().all(is_near) {
        Ok(observation)
    } else {
        Err(observation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_charge_by_the_kilobyte_is_not_near_the_published_price() {
        assert!(compare(&[("create", 5.35, 5.35), ("read", 1.2, 1.0)]).is_ok());
        assert!(compare(&[("create", 88.0, 9.92)]).is_err());
    }
}
