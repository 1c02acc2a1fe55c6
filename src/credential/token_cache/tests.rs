//! Tests of the token cache with a credential that counts its requests.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use azure_core::time::OffsetDateTime;
use tokio::sync::{watch, Semaphore};

use super::*;

const SCOPE: &str = "https://cosmos.azure.com/.default";
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(60 * 60);

/// A credential that counts its requests. Its tokens have a fixed lifetime. A test can make it wait or fail.
#[derive(Debug)]
struct Counting {
    clock: Arc<AtomicU64>,
    lifetime: Duration,
    begun: watch::Sender<u64>,
    ended: watch::Sender<u64>,
    gate: Semaphore,
    failing: std::sync::atomic::AtomicBool,
    number: AtomicU64,
}

struct TokenFixture {
    inner: Arc<Counting>,
    cached: Arc<CachingCredential>,
    clock: Arc<AtomicU64>,
}

impl TokenFixture {
    fn new(lifetime: Duration) -> Self {
        let clock = Arc::new(AtomicU64::new(1_763_256_000_000));
        let inner = Arc::new(Counting {
            clock: clock.clone(),
            lifetime,
            begun: watch::Sender::new(0),
            ended: watch::Sender::new(0),
            gate: Semaphore::new(Semaphore::MAX_PERMITS),
            failing: false.into(),
            number: AtomicU64::new(0),
        });
        let time = clock.clone();
        let now = Clock::from_fn(move || time.load(SeqCst));
        let cached = Arc::new(CachingCredential::new(inner.clone(), now, Randomness::seeded(1)));
        Self { cached, inner, clock }
    }

    fn pass(&self, time: Duration) {
        self.clock.fetch_add(millis(time), SeqCst);
    }

    async fn token(&self) -> String {
        self.cached.get_token(&[SCOPE], None).await.unwrap().token.secret().to_owned()
    }

    /// Waits until `fetches` fetches have ended and the cache has stored their results.
    async fn finished(&self, fetches: u64) {
        self.inner.ended.subscribe().wait_for(|ended| *ended >= fetches).await.unwrap();
        let scopes = [SCOPE.to_owned()];
        while self.cached.entries.with(&scopes, |entry| entry.in_flight.is_some()) {
            tokio::task::yield_now().await;
        }
    }

    fn fetches(&self) -> u64 {
        *self.inner.begun.borrow()
    }
}

#[async_trait]
impl TokenCredential for Counting {
    async fn get_token(
        &self,
        scopes: &[&str],
        _options: Option<TokenRequestOptions<'_>>,
    ) -> azure_core::Result<AccessToken> {
        self.begun.send_modify(|begun| *begun += 1);
        self.gate.acquire().await.unwrap().forget();
        let failing = self.failing.load(SeqCst);
        let number = self.number.fetch_add(1, SeqCst) + 1;
        self.ended.send_modify(|ended| *ended += 1);
        if failing {
            let cause = std::io::Error::other("az is not installed");
            return Err(azure_core::Error::with_error(ErrorKind::Credential, cause, "no token"));
        }
        let now = OffsetDateTime::UNIX_EPOCH + Duration::from_millis(self.clock.load(SeqCst));
        Ok(AccessToken::new(format!("{number} for {}", scopes.join(" ")), now + self.lifetime))
    }
}

#[tokio::test]
async fn a_token_is_fetched_once_until_shortly_before_it_expires() {
    let fixture = TokenFixture::new(HOUR);
    let first = fixture.token().await;
    fixture.pass(MINUTE * 54);
    assert_eq!(fixture.token().await, first);
    assert_eq!(fixture.fetches(), 1);
}

#[tokio::test]
async fn a_token_that_is_due_for_renewal_is_used_while_the_next_one_is_fetched() {
    let fixture = TokenFixture::new(HOUR);
    let first = fixture.token().await;
    fixture.pass(MINUTE * 56);
    fixture.inner.gate.forget_permits(Semaphore::MAX_PERMITS);
    for _ in 0..5 {
        assert_eq!(fixture.token().await, first);
    }
    fixture.inner.begun.subscribe().wait_for(|begun| *begun == 2).await.unwrap();
    fixture.inner.gate.add_permits(1);
    fixture.finished(2).await;
    assert_ne!(fixture.token().await, first);
    assert_eq!(fixture.fetches(), 2);
}

#[tokio::test]
async fn a_token_with_a_short_lifetime_is_renewed_at_half_of_it() {
    let fixture = TokenFixture::new(MINUTE * 2);
    let first = fixture.token().await;
    fixture.pass(SECOND * 59);
    assert_eq!((fixture.token().await, fixture.fetches()), (first.clone(), 1));
    fixture.pass(SECOND * 2);
    assert_eq!(fixture.token().await, first);
    fixture.finished(2).await;
    assert_ne!(fixture.token().await, first);
}

#[tokio::test]
async fn concurrent_callers_share_one_fetch() {
    let fixture = TokenFixture::new(HOUR);
    fixture.inner.gate.forget_permits(Semaphore::MAX_PERMITS);
    let asking: Vec<_> = (0..50)
        .map(|_| {
            let cached = fixture.cached.clone();
            tokio::spawn(async move { cached.get_token(&[SCOPE], None).await.unwrap().token.secret().to_owned() })
        })
        .collect();
    fixture.inner.begun.subscribe().wait_for(|begun| *begun == 1).await.unwrap();
    fixture.inner.gate.add_permits(1);
    for asked in asking {
        assert_eq!(asked.await.unwrap(), format!("1 for {SCOPE}"));
    }
    assert_eq!(fixture.fetches(), 1);
}

#[tokio::test]
async fn a_cancelled_caller_does_not_cancel_the_fetch() {
    let fixture = TokenFixture::new(HOUR);
    fixture.inner.gate.forget_permits(Semaphore::MAX_PERMITS);
    let cached = fixture.cached.clone();
    let caller = tokio::spawn(async move { cached.get_token(&[SCOPE], None).await });
    fixture.inner.begun.subscribe().wait_for(|begun| *begun == 1).await.unwrap();
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    fixture.inner.gate.add_permits(1);
    assert_eq!(fixture.token().await, format!("1 for {SCOPE}"));
    assert_eq!(fixture.fetches(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_old_token_is_used_while_it_is_valid_if_renewal_fails() {
    let fixture = TokenFixture::new(HOUR);
    let first = fixture.token().await;
    fixture.pass(MINUTE * 56);
    fixture.inner.failing.store(true, SeqCst);
    assert_eq!(fixture.token().await, first);
    fixture.finished(2).await;
    assert_eq!((fixture.token().await, fixture.fetches()), (first.clone(), 2), "not tried again at once");
    fixture.pass(SECOND * 11);
    assert_eq!(fixture.token().await, first);
    fixture.finished(3).await;
    fixture.pass(MINUTE * 5);
    assert!(fixture.cached.get_token(&[SCOPE], None).await.is_err(), "it has expired");
    fixture.inner.failing.store(false, SeqCst);
    tokio::time::advance(FIRST_PAUSE * 2).await;
    assert_ne!(fixture.token().await, first);
}

#[tokio::test(start_paused = true)]
async fn an_error_has_its_reasons() {
    let fixture = TokenFixture::new(HOUR);
    fixture.inner.failing.store(true, SeqCst);
    let error = fixture.cached.get_token(&[SCOPE], None).await.unwrap_err();
    let mut reasons = vec![error.to_string()];
    let mut cause = StdError::source(&error);
    while let Some(reason) = cause {
        reasons.push(reason.to_string());
        cause = reason.source();
    }
    let reasons = reasons.join(": ");
    assert!(reasons.contains("no token") && reasons.contains("az is not installed"), "{reasons}");
}

#[tokio::test(start_paused = true)]
async fn fetches_from_a_failing_credential_become_less_frequent_until_one_succeeds() {
    let fixture = TokenFixture::new(HOUR);
    fixture.inner.failing.store(true, SeqCst);
    // Ten requests a second for 90 s. The SDK asks for a token with each of them.
    for _ in 0..900 {
        fixture.cached.get_token(&[SCOPE], None).await.unwrap_err();
        tokio::time::advance(Duration::from_millis(100)).await;
    }
    assert!((5..=9).contains(&fixture.fetches()), "{} fetches", fixture.fetches());
    fixture.inner.failing.store(false, SeqCst);
    tokio::time::advance(LONGEST_PAUSE * 2).await;
    fixture.token().await;
    let fetches = fixture.fetches();
    fixture.token().await;
    assert_eq!(fixture.fetches(), fetches);
}

#[tokio::test(start_paused = true)]
async fn a_fetch_that_never_ends_times_out_and_the_next_one_begins() {
    let fixture = TokenFixture::new(HOUR);
    fixture.inner.gate.forget_permits(Semaphore::MAX_PERMITS);
    let error = fixture.cached.get_token(&[SCOPE], None).await.unwrap_err();
    assert!(error.to_string().contains("no answer within 30s"), "{error}");
    fixture.inner.gate.add_permits(1);
    tokio::time::advance(FIRST_PAUSE * 2).await;
    fixture.token().await;
    assert_eq!(fixture.fetches(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_refused_token_is_replaced_at_most_once_a_minute() {
    let fixture = TokenFixture::new(HOUR);
    let (first, tokens) = (fixture.token().await, fixture.cached.tokens());
    let begun = Instant::now();
    assert!(tokens.drop_refused(begun));
    let second = fixture.token().await;
    assert_ne!(second, first);
    tokio::time::advance(SECOND).await;
    assert!(tokens.drop_refused(begun), "a request that was in flight with the first token");
    assert!(!tokens.drop_refused(Instant::now()));
    assert_eq!(fixture.token().await, second);
    tokio::time::advance(DROP_INTERVAL).await;
    assert!(tokens.drop_refused(Instant::now()));
    fixture.token().await;
    assert_eq!(fixture.fetches(), 3);
}

/// A credential that always returns the same token, as those of `azure_identity` do while it is valid.
#[derive(Debug)]
struct Constant(String);

#[async_trait]
impl TokenCredential for Constant {
    async fn get_token(
        &self,
        _scopes: &[&str],
        _options: Option<TokenRequestOptions<'_>>,
    ) -> azure_core::Result<AccessToken> {
        Ok(AccessToken::new(self.0.clone(), OffsetDateTime::UNIX_EPOCH + HOUR * 1_000_000))
    }
}

#[tokio::test(start_paused = true)]
async fn a_credential_that_caches_tokens_is_created_again_after_a_refusal() {
    let made = AtomicU64::new(1);
    let again = move || {
        let number = made.fetch_add(1, SeqCst) + 1;
        Some(Arc::new(Constant(format!("token {number}"))) as Arc<dyn TokenCredential>)
    };
    let first = Arc::new(Constant("token 1".to_owned()));
    let cached = CachingCredential::new(first, Clock::system(), Randomness::seeded(1)).recreated_by(again);
    let token = || async { cached.get_token(&[SCOPE], None).await.unwrap().token.secret().to_owned() };
    assert_eq!(token().await, "token 1");
    assert!(cached.tokens().drop_refused(Instant::now()));
    assert_eq!(token().await, "token 2");
    assert_eq!(token().await, "token 2");
}

#[tokio::test]
async fn each_set_of_scopes_has_its_own_token() {
    let fixture = TokenFixture::new(HOUR);
    let other = ["https://other/.default", "https://more/.default"];
    for _ in 0..2 {
        assert_eq!(fixture.token().await, format!("1 for {SCOPE}"));
        let token = fixture.cached.get_token(&other, None).await.unwrap();
        assert_eq!(token.token.secret(), "2 for https://other/.default https://more/.default");
    }
    assert_eq!(fixture.fetches(), 2);
}

#[tokio::test]
async fn an_expired_token_is_returned_and_not_cached() {
    let fixture = TokenFixture::new(Duration::ZERO);
    assert_eq!(fixture.token().await, format!("1 for {SCOPE}"));
    assert_eq!(fixture.token().await, format!("2 for {SCOPE}"));
}

#[test]
fn a_fetch_that_ends_with_its_runtime_begins_again_in_the_next_one() {
    let fixture = TokenFixture::new(HOUR);
    fixture.inner.gate.forget_permits(Semaphore::MAX_PERMITS);
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime().block_on(async {
        let cached = fixture.cached.clone();
        tokio::spawn(async move { cached.get_token(&[SCOPE], None).await });
        fixture.inner.begun.subscribe().wait_for(|begun| *begun == 1).await.unwrap();
    });
    fixture.inner.gate.add_permits(1);
    assert_eq!(runtime().block_on(fixture.token()), format!("1 for {SCOPE}"));
    assert_eq!(fixture.fetches(), 2);
}

#[tokio::test]
async fn debug_shows_no_token() {
    let fixture = TokenFixture::new(HOUR);
    let token = fixture.token().await;
    assert!(!format!("{:?}", fixture.cached).contains(&token));
}
