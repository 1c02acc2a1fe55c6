//! The prices of the service, in request units: estimates from published prices, not measured on Azure.
//!
//! Point operations follow the table that Microsoft publishes ("Understand request unit consumption"). Prices between
//! two sizes of the table are interpolated. Below 1 KB the price is flat. A replacement costs twice as much as a
//! creation. Each index term that a write adds or removes costs 0.2 RU.
//!
//! Microsoft publishes no table for queries. Their prices are estimates of this project.

/// The sizes of the published table.
const KILOBYTES: [f64; 12] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0];

const READ: [f64; 12] = [1.0, 1.04, 1.14, 1.33, 1.67, 2.19, 4.76, 9.95, 20.28, 40.95, 145.9, 291.8];

const CREATE: [f64; 12] = [4.95, 6.29, 6.67, 7.04, 9.52, 11.23, 22.67, 48.19, 98.29, 184.57, 625.0, 1250.0];

/// The price of a deletion. It does not depend on the size of the document.
pub(crate) const DELETE: f64 = 5.0;

/// The price of an index term that a write adds or removes.
pub(crate) const TERM: f64 = 0.2;

/// The price of each property of a patch, in addition to the replacement.
pub(crate) const PATCHED_PROPERTY: f64 = 0.4;

/// The factor for a read at strong or bounded staleness, which reads two replicas.
pub(crate) const QUORUM: f64 = 2.0;

/// The price of a request that the service refuses.
const REFUSED: f64 = 1.0;

/// The price of a query page for each physical partition that it visits. Live accounts charge at least about 2.3 RU.
const QUERY_PARTITION: f64 = 2.5;

/// The price of a query page for each KB that it returns. It is the slope of the read price for large documents.
const QUERY_KILOBYTE: f64 = 0.15;

/// Returns the price of a point read of a document of this many bytes.
pub(crate) fn read(bytes: usize) -> f64 {
    interpolate(&READ, bytes)
}

/// Returns the price of creating a document of this many bytes, without its index terms.
pub(crate) fn create(bytes: usize) -> f64 {
    interpolate(&CREATE, bytes)
}

/// Returns the price of replacing a document by one of this many bytes, without the changed index terms.
pub(crate) fn replace(bytes: usize) -> f64 {
    2.0 * create(bytes)
}

/// Returns the estimated price of a query page of this many bytes.
pub(crate) fn query(partitions: usize, bytes: usize) -> f64 {
    QUERY_PARTITION * partitions as f64 + QUERY_KILOBYTE * kilobytes(bytes)
}

/// Returns the price of a request, or of an operation in a batch, that failed with this status. These are free:
/// throttled requests, operations that were rolled back because of another one, and failures of the service itself.
pub(crate) fn failed(status: u16) -> f64 {
    match status {
        424 | 429 => 0.0,
        400..=499 => REFUSED,
        _ => 0.0,
    }
}

fn kilobytes(bytes: usize) -> f64 {
    bytes as f64 / 1024.0
}

fn interpolate(prices: &[f64; 12], bytes: usize) -> f64 {
    let size = kilobytes(bytes).clamp(KILOBYTES[0], KILOBYTES[11]);
    let upper = KILOBYTES.iter().position(|point| size <= *point).unwrap_or(11).max(1);
    let share = (size - KILOBYTES[upper - 1]) / (KILOBYTES[upper] - KILOBYTES[upper - 1]);
    prices[upper - 1] + share * (prices[upper] - prices[upper - 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(left: f64, right: f64) -> bool {
        (left - right).abs() < 1e-9
    }

    #[test]
    fn prices_at_the_sizes_of_the_table_are_exact() {
        for (point, kilobytes) in KILOBYTES.iter().enumerate() {
            let bytes = *kilobytes as usize * 1024;
            assert!(close(read(bytes), READ[point]), "read of {kilobytes} KB");
            assert!(close(create(bytes), CREATE[point]), "create of {kilobytes} KB");
        }
    }

    #[test]
    fn prices_are_interpolated_between_two_sizes_and_flat_below_1_kb() {
        assert!(close(read(3 * 1024), (1.04 + 1.14) / 2.0));
        assert!(close(create(1536), (4.95 + 6.29) / 2.0));
        assert!(close(read(0), 1.0) && close(create(10), 4.95));
        assert!(close(create(3 << 20), 1250.0), "there is no larger document");
    }

    #[test]
    fn a_replacement_costs_twice_a_creation() {
        assert!(close(replace(1024), 9.9));
        assert!(close(replace(64 * 1024), 45.34));
    }

    #[test]
    fn the_price_of_a_query_page_depends_on_partitions_and_bytes() {
        assert!(close(query(1, 0), 2.5));
        assert!(close(query(4, 10 * 1024), 11.5));
    }

    #[test]
    fn refusals_cost_1_and_failures_of_the_service_are_free() {
        let costs = [400, 404, 409, 412, 424, 429, 449, 500, 503].map(failed);
        assert_eq!(costs, [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]);
    }
}
