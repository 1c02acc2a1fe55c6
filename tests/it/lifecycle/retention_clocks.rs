//! Retention goes by the time of Cosmos DB, whatever the clocks of the workers say.

use crate::fixture::*;
use duroxide_cosmos::Retention;
use std::time::Duration;

const WEEK: i64 = 7 * 24 * 3_600_000;

const HOUR: Duration = Duration::from_secs(3_600);

fn after_an_hour() -> Retention {
    Retention::default().with_completed(HOUR).with_failed(HOUR).with_cancelled(HOUR)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_ahead_does_not_shorten_the_retention_time() {
    let fixture = Fixture::new(1);
    let worker = fixture.provider("worker").await;
    finish(&worker, "i", None).await;
    let ahead =
        fixture.provider_with("ahead", test_config().with_clock(off_by(WEEK)).with_retention(after_an_hour())).await;
    assert_eq!(ahead.apply_retention().await.unwrap(), 0);
    assert_eq!(status_of(&worker, "i").await.as_deref(), Some("Completed"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_whose_clock_is_behind_does_not_shorten_the_retention_time_of_its_instances() {
    let fixture = Fixture::new(1);
    let behind = fixture.provider_with("behind", test_config().with_clock(off_by(-WEEK))).await;
    finish(&behind, "i", None).await;
    let keeper = fixture.provider_with("keeper", test_config().with_retention(after_an_hour())).await;
    for _ in 0..2 {
        assert_eq!(keeper.apply_retention().await.unwrap(), 0);
    }
    assert_eq!(status_of(&keeper, "i").await.as_deref(), Some("Completed"));
    // The instance is deleted an hour after its end by the time of Cosmos DB, and is not written again until then.
    let before = fixture.documents_of_type("i", "instance").await.remove(0);
    assert_eq!(keeper.apply_retention().await.unwrap(), 0);
    assert_eq!(fixture.documents_of_type("i", "instance").await[0]["_etag"], before["_etag"]);
    let at_once = Retention::default().with_completed(Duration::from_secs(1));
    let other = fixture.provider_with("other", test_config().with_retention(at_once)).await;
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    assert_eq!(other.apply_retention().await.unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_clocks_that_are_behind_do_not_shorten_the_retention_time() {
    let fixture = Fixture::new(1);
    let worker = fixture.provider_with("worker", test_config().with_clock(off_by(-2 * WEEK))).await;
    finish(&worker, "i", None).await;
    let retention = Retention::default().with_completed(HOUR);
    let config = test_config().with_clock(off_by(-WEEK)).with_retention(retention);
    let keeper = fixture.provider_with("keeper", config).await;
    assert_eq!(keeper.apply_retention().await.unwrap(), 0, "it ended a moment ago");
}
