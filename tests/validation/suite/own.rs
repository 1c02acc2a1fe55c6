//! duroxide's functions that take more than a factory, as functions that don't.

use duroxide::{
    provider_validation::ProviderFactory,
    provider_validations::{long_polling, race_replay},
};

pub async fn test_continue_as_new_transition_delivery_of_an_old_execution<F: ProviderFactory>(factory: &F) {
    race_replay::test_continue_as_new_transition_delivery(factory, "0.1.30").await;
}

pub async fn test_continue_as_new_transition_delivery_of_a_new_execution<F: ProviderFactory>(factory: &F) {
    race_replay::test_continue_as_new_transition_delivery(factory, "0.1.31").await;
}

// The two functions for providers that do not wait, test_short_poll_returns_immediately and
// test_short_poll_work_item_returns_immediately, are not for this one: it waits.

pub async fn test_long_poll_waits_for_timeout<F: ProviderFactory>(factory: &F) {
    long_polling::test_long_poll_waits_for_timeout(&*factory.create_provider().await).await;
}

pub async fn test_fetch_respects_timeout_upper_bound<F: ProviderFactory>(factory: &F) {
    long_polling::test_fetch_respects_timeout_upper_bound(&*factory.create_provider().await).await;
}

pub async fn test_long_poll_work_item_waits_for_timeout<F: ProviderFactory>(factory: &F) {
    long_polling::test_long_poll_work_item_waits_for_timeout(&*factory.create_provider().await).await;
}
