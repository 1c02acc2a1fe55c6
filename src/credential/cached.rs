//! Tokens are asked for once and cached until shortly before they expire.
//!
//! The SDK asks the credential for a token with every request, and not every credential keeps them: the developer tools
//! start `az` each time. Here
//!
//! - a token that is due for renewal is still used while it is valid; the new one is fetched beside the requests;
//! - however many ask, one fetch is under way for each set of scopes, in a task of its own: a caller whose time is up does
//!   not take it along;
//! - where renewal fails, the old token serves as long as it is valid. Without a valid token, a failure is told to everyone
//!   who asks until the pause after it is over: 1, 2, 4 … 30 s, with jitter;
//! - a fetch that takes longer than [`TIME_LIMIT`] has failed;
//! - a token that the service refuses is dropped, once in [`DROP_INTERVAL`], and the next request fetches another.

use std::{
    collections::HashMap,
    error::Error as StdError,
    fmt,
    sync::{
        atomic::{AtomicBool, Ordering},
        Arc, Mutex, MutexGuard, PoisonError,
    },
    time::Duration,
};

use async_trait::async_trait;
use azure_core::{
    credentials::{AccessToken, TokenCredential, TokenRequestOptions},
    error::ErrorKind,
};
use futures::{
    future::{BoxFuture, Shared},
    FutureExt,
};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::warn;

use crate::model::{clock::millis, Clock, Millis, Randomness};

/// A token is renewed this long before it expires, or at half of its incarnation where that is shorter.
const AHEAD: Duration = Duration::from_secs(5 * 60);
/// How long a renewal that failed is left alone while the old token is valid.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// What one fetch may take. Some credentials have no limit of their own.
const TIME_LIMIT: Duration = Duration::from_secs(30);
/// The pauses after a fetch that failed while there is no valid token.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How often a token that the service refuses is replaced. If the next one is refused as well, the token is not at fault.
const DROP_INTERVAL: Duration = Duration::from_secs(60);

type Make = Box<dyn Fn() -> Option<Arc<dyn TokenCredential>> + Send + Sync>;
type Fetch = Shared<BoxFuture<'static, Result<AccessToken, SharedError>>>;
type TokenSender = oneshot::Sender<Result<AccessToken, SharedError>>;

/// A credential that keeps what another one gives.
pub(super) struct Cached {
    inner: Mutex<Arc<dyn TokenCredential>>,
    /// Makes the inner credential anew. Those of `azure_identity` keep tokens themselves, by this machine's clock, and would
    /// give the one again that the service has refused.
    make: Option<Make>,
    clock: Clock,
    randomness: Randomness,
    entries: Arc<CachedTokens>,
}

/// The tokens of one client, so that the code that meets a refusal can drop them.
#[derive(Clone, Default)]
pub(crate) struct TokenCache(Arc<CachedTokens>);

impl TokenCache {
    /// Drops the tokens after the service refused one of a request that was begun at `begun`. Whether the next attempt has
    /// another token: `false` where the one that was refused is that other token already.
    pub(crate) fn drop_refused(&self, begun: Instant) -> bool {
        let mut entries = self.0.lock();
        let now = Instant::now();
        let mut has_another = false;
        for entry in entries.values_mut() {
            let is_recent = entry.dropped_at.is_some_and(|at| now.duration_since(at) < DROP_INTERVAL);
            if !is_recent && entry.cached.take().is_some() {
                entry.dropped_at = Some(now);
                self.0.dropped.store(true, Ordering::SeqCst);
            }
            // Many may be on their way with the same token: only the first of them drops it.
            has_another |= entry.dropped_at.is_some_and(|at| begun <= at);
        }
        has_another
    }
}

impl fmt::Debug for TokenCache {
    // Not derived: it holds tokens.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenCache")
    }
}

/// By scopes. What else a request for a token carries is about how it is sent.
#[derive(Default)]
struct CachedTokens {
    by_scopes: Mutex<HashMap<Vec<String>, ScopeEntry>>,
    /// A token was dropped since the inner credential was made.
    dropped: AtomicBool,
}

#[derive(Default)]
struct ScopeEntry {
    cached: Option<CachedToken>,
    in_flight: Option<Fetch>,
    failure: Option<RefreshFailure>,
    dropped_at: Option<Instant>,
}

/// A fetch that failed.
struct RefreshFailure {
    error: SharedError,
    pause: Duration,
    /// No other fetch begins before then.
    until: Instant,
}

struct CachedToken {
    token: AccessToken,
    renew_at: Millis,
}

impl CachedToken {
    fn is_valid(&self, now: Millis) -> bool {
        now < expiry(&self.token)
    }
}

/// When a token expires; zero where that was before the epoch.
fn expiry(token: &AccessToken) -> Millis {
    u64::try_from(token.expires_on.unix_timestamp_nanos() / 1_000_000).unwrap_or(0)
}

/// What a caller does.
enum TokenPlan {
    Use(AccessToken),
    Await(Fetch),
    Fail(SharedError),
}

impl Cached {
    pub(super) fn new(inner: Arc<dyn TokenCredential>, clock: Clock, randomness: Randomness) -> Self {
        Self { inner: Mutex::new(inner), make: None, clock, randomness, entries: Arc::default() }
    }

    /// With a way to make the inner credential anew once a token of it was refused.
    pub(super) fn made_again_by(
        self,
        make: impl Fn() -> Option<Arc<dyn TokenCredential>> + Send + Sync + 'static,
    ) -> Self {
        Self { make: Some(Box::new(make)), ..self }
    }

    /// The credential that is asked: a new one after a token was dropped.
    fn inner(&self) -> Arc<dyn TokenCredential> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if self.entries.dropped.swap(false, Ordering::SeqCst) {
            if let Some(anew) = self.make.as_ref().and_then(|make| make()) {
                *inner = anew;
            }
        }
        inner.clone()
    }

    pub(super) fn tokens(&self) -> TokenCache {
        TokenCache(self.entries.clone())
    }

    /// What a caller does, and what is to be begun for it: not here, where the entries are locked.
    fn plan(&self, scopes: &[String]) -> (TokenPlan, Option<TokenSender>) {
        let now = self.clock.now();
        self.entries.with(scopes, |entry| {
            let valid = entry.cached.as_ref().filter(|cached| cached.is_valid(now));
            if let Some(cached) = valid.filter(|cached| now < cached.renew_at) {
                return (TokenPlan::Use(cached.token.clone()), None);
            }
            let old = valid.map(|cached| cached.token.clone());
            let failure = entry.failure.as_ref().filter(|failure| Instant::now() < failure.until);
            if let (None, Some(failure)) = (&old, failure) {
                return (TokenPlan::Fail(failure.error.clone()), None);
            }
            let (fetch, begin) = entry.join_fetch();
            (old.map_or(TokenPlan::Await(fetch), TokenPlan::Use), begin)
        })
    }

    /// Fetches a token in a task that goes on whether anybody waits or not.
    fn begin(&self, scopes: Vec<String>, answer: TokenSender) {
        let (inner, clock, jitter) = (self.inner(), self.clock.clone(), self.randomness.fraction());
        let in_flight = RefreshInFlight { entries: self.entries.clone(), scopes };
        tokio::spawn(async move {
            let scopes: Vec<&str> = in_flight.scopes.iter().map(String::as_str).collect();
            let token = match tokio::time::timeout(TIME_LIMIT, inner.get_token(&scopes, None)).await {
                Ok(token) => token.map_err(SharedError::new),
                Err(_) => Err(SharedError::new(NoAnswer)),
            };
            in_flight.entries.with(&in_flight.scopes, |entry| entry.keep(&token, clock.now(), jitter));
            drop(in_flight);
            // Nobody may be waiting.
            let _ = answer.send(token);
        });
    }
}

impl CachedTokens {
    fn lock(&self) -> MutexGuard<'_, HashMap<Vec<String>, ScopeEntry>> {
        self.by_scopes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<R>(&self, scopes: &[String], look: impl FnOnce(&mut ScopeEntry) -> R) -> R {
        look(self.lock().entry(scopes.to_vec()).or_default())
    }
}

impl ScopeEntry {
    /// The fetch that is under way, or a new one, which the caller begins.
    fn join_fetch(&mut self) -> (Fetch, Option<TokenSender>) {
        if let Some(fetch) = &self.in_flight {
            return (fetch.clone(), None);
        }
        let (answer, answered) = oneshot::channel();
        let ended = async move { answered.await.unwrap_or_else(|cut_off| Err(SharedError::new(cut_off))) };
        let fetch = ended.boxed().shared();
        self.in_flight = Some(fetch.clone());
        (fetch, Some(answer))
    }

    /// Takes what a fetch gave: its token, or else the old one a while longer.
    fn keep(&mut self, answer: &Result<AccessToken, SharedError>, now: Millis, jitter: f64) {
        match answer {
            Ok(token) => {
                self.failure = None;
                let expiry = expiry(token);
                let ahead = millis(AHEAD).min(expiry.saturating_sub(now) / 2);
                self.cached = Some(CachedToken { token: token.clone(), renew_at: expiry - ahead });
            }
            Err(error) => {
                if let Some(cached) = self.cached.as_mut().filter(|cached| cached.is_valid(now)) {
                    warn!(%error, expires = %cached.token.expires_on, "the token could not be renewed; the old one is used");
                    cached.renew_at = now + millis(RETRY_AFTER);
                } else {
                    self.fail(error.clone(), jitter);
                }
            }
        }
    }

    /// Puts the next fetch off, for longer after each failure.
    fn fail(&mut self, error: SharedError, jitter: f64) {
        let pause = self.failure.as_ref().map_or(FIRST_PAUSE, |before| (before.pause * 2).min(LONGEST_PAUSE));
        let until = Instant::now() + pause.mul_f64(0.75 + jitter / 2.0);
        self.failure = Some(RefreshFailure { error, pause, until });
    }
}

/// A fetch under way. However it ends, also with its runtime, the next caller may begin another.
struct RefreshInFlight {
    entries: Arc<CachedTokens>,
    scopes: Vec<String>,
}

impl Drop for RefreshInFlight {
    fn drop(&mut self) {
        self.entries.with(&self.scopes, |entry| entry.in_flight = None);
    }
}

#[async_trait]
impl TokenCredential for Cached {
    async fn get_token(
        &self,
        scopes: &[&str],
        _options: Option<TokenRequestOptions<'_>>,
    ) -> azure_core::Result<AccessToken> {
        let scopes: Vec<String> = scopes.iter().map(|scope| (*scope).to_owned()).collect();
        let (plan, begin) = self.plan(&scopes);
        if let Some(answer) = begin {
            self.begin(scopes, answer);
        }
        match plan {
            TokenPlan::Use(token) => Ok(token),
            TokenPlan::Await(fetch) => {
                fetch.await.map_err(|error| azure_core::Error::new(ErrorKind::Credential, error))
            }
            TokenPlan::Fail(error) => Err(azure_core::Error::new(ErrorKind::Credential, error)),
        }
    }
}

impl fmt::Debug for Cached {
    // Not derived: it holds tokens.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cached")
    }
}

/// A credential that does not answer.
#[derive(Debug)]
struct NoAnswer;

impl fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the credential gave no answer within {TIME_LIMIT:?}")
    }
}

impl StdError for NoAnswer {}

/// One failure, told to all who waited for it.
#[derive(Clone, Debug)]
struct SharedError(Arc<dyn StdError + Send + Sync>);

impl SharedError {
    fn new(error: impl StdError + Send + Sync + 'static) -> Self {
        Self(Arc::new(error))
    }
}

impl fmt::Display for SharedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl StdError for SharedError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

    use azure_core::time::OffsetDateTime;
    use tokio::sync::{watch, Semaphore};

    use super::*;

    const SCOPE: &str = "https://cosmos.azure.com/.default";
    const SECOND: Duration = Duration::from_secs(1);
    const MINUTE: Duration = Duration::from_secs(60);
    const HOUR: Duration = Duration::from_secs(60 * 60);

    /// A credential that counts, gives tokens of a certain incarnation, and can be made to wait or to fail.
    #[derive(Debug)]
    struct Counting {
        clock: Arc<AtomicU64>,
        incarnation: Duration,
        begun: watch::Sender<u64>,
        ended: watch::Sender<u64>,
        gate: Semaphore,
        failing: std::sync::atomic::AtomicBool,
        number: AtomicU64,
    }

    struct TokenFixture {
        inner: Arc<Counting>,
        cached: Arc<Cached>,
        clock: Arc<AtomicU64>,
    }

    impl TokenFixture {
        fn new(incarnation: Duration) -> Self {
            let clock = Arc::new(AtomicU64::new(1_763_256_000_000));
            let inner = Arc::new(Counting {
                clock: clock.clone(),
                incarnation,
                begun: watch::Sender::new(0),
                ended: watch::Sender::new(0),
                gate: Semaphore::new(Semaphore::MAX_PERMITS),
                failing: false.into(),
                number: AtomicU64::new(0),
            });
            let time = clock.clone();
            let now = Clock::from_fn(move || time.load(SeqCst));
            let cached = Arc::new(Cached::new(inner.clone(), now, Randomness::seeded(1)));
            Self { cached, inner, clock }
        }

        fn pass(&self, time: Duration) {
            self.clock.fetch_add(millis(time), SeqCst);
        }

        async fn token(&self) -> String {
            self.cached.get_token(&[SCOPE], None).await.unwrap().token.secret().to_owned()
        }

        /// Waits until so many fetches have come to an end and are known to have.
        async fn settled(&self, fetches: u64) {
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
                let cause = std::io::Error::other("az is not there");
                return Err(azure_core::Error::with_error(ErrorKind::Credential, cause, "no token"));
            }
            let now = OffsetDateTime::UNIX_EPOCH + Duration::from_millis(self.clock.load(SeqCst));
            Ok(AccessToken::new(format!("{number} for {}", scopes.join(" ")), now + self.incarnation))
        }
    }

    #[tokio::test]
    async fn a_token_is_asked_for_once_until_shortly_before_it_expires() {
        let scene = TokenFixture::new(HOUR);
        let first = scene.token().await;
        scene.pass(MINUTE * 54);
        assert_eq!(scene.token().await, first);
        assert_eq!(scene.fetches(), 1);
    }

    #[tokio::test]
    async fn a_token_that_is_due_serves_while_the_next_one_is_fetched() {
        let scene = TokenFixture::new(HOUR);
        let first = scene.token().await;
        scene.pass(MINUTE * 56);
        scene.inner.gate.forget_permits(Semaphore::MAX_PERMITS);
        for _ in 0..5 {
            assert_eq!(scene.token().await, first);
        }
        scene.inner.begun.subscribe().wait_for(|begun| *begun == 2).await.unwrap();
        scene.inner.gate.add_permits(1);
        scene.settled(2).await;
        assert_ne!(scene.token().await, first);
        assert_eq!(scene.fetches(), 2);
    }

    #[tokio::test]
    async fn a_token_of_a_short_life_is_renewed_at_half_of_it() {
        let scene = TokenFixture::new(MINUTE * 2);
        let first = scene.token().await;
        scene.pass(SECOND * 59);
        assert_eq!((scene.token().await, scene.fetches()), (first.clone(), 1));
        scene.pass(SECOND * 2);
        assert_eq!(scene.token().await, first);
        scene.settled(2).await;
        assert_ne!(scene.token().await, first);
    }

    #[tokio::test]
    async fn many_who_ask_at_once_share_one_fetch() {
        let scene = TokenFixture::new(HOUR);
        scene.inner.gate.forget_permits(Semaphore::MAX_PERMITS);
        let asking: Vec<_> = (0..50)
            .map(|_| {
                let cached = scene.cached.clone();
                tokio::spawn(async move { cached.get_token(&[SCOPE], None).await.unwrap().token.secret().to_owned() })
            })
            .collect();
        scene.inner.begun.subscribe().wait_for(|begun| *begun == 1).await.unwrap();
        scene.inner.gate.add_permits(1);
        for asked in asking {
            assert_eq!(asked.await.unwrap(), format!("1 for {SCOPE}"));
        }
        assert_eq!(scene.fetches(), 1);
    }

    #[tokio::test]
    async fn a_caller_who_gives_up_does_not_take_the_fetch_along() {
        let scene = TokenFixture::new(HOUR);
        scene.inner.gate.forget_permits(Semaphore::MAX_PERMITS);
        let cached = scene.cached.clone();
        let caller = tokio::spawn(async move { cached.get_token(&[SCOPE], None).await });
        scene.inner.begun.subscribe().wait_for(|begun| *begun == 1).await.unwrap();
        caller.abort();
        assert!(caller.await.unwrap_err().is_cancelled());
        scene.inner.gate.add_permits(1);
        assert_eq!(scene.token().await, format!("1 for {SCOPE}"));
        assert_eq!(scene.fetches(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_token_serves_as_long_as_it_is_valid_where_renewal_fails() {
        let scene = TokenFixture::new(HOUR);
        let first = scene.token().await;
        scene.pass(MINUTE * 56);
        scene.inner.failing.store(true, SeqCst);
        assert_eq!(scene.token().await, first);
        scene.settled(2).await;
        assert_eq!((scene.token().await, scene.fetches()), (first.clone(), 2), "not tried again at once");
        scene.pass(SECOND * 11);
        assert_eq!(scene.token().await, first);
        scene.settled(3).await;
        scene.pass(MINUTE * 5);
        assert!(scene.cached.get_token(&[SCOPE], None).await.is_err(), "it has expired");
        scene.inner.failing.store(false, SeqCst);
        tokio::time::advance(FIRST_PAUSE * 2).await;
        assert_ne!(scene.token().await, first);
    }

    #[tokio::test(start_paused = true)]
    async fn an_error_is_told_with_its_reasons() {
        let scene = TokenFixture::new(HOUR);
        scene.inner.failing.store(true, SeqCst);
        let error = scene.cached.get_token(&[SCOPE], None).await.unwrap_err();
        let mut reasons = vec![error.to_string()];
        let mut cause = StdError::source(&error);
        while let Some(reason) = cause {
            reasons.push(reason.to_string());
            cause = reason.source();
        }
        let reasons = reasons.join(": ");
        assert!(reasons.contains("no token") && reasons.contains("az is not there"), "{reasons}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_credential_that_fails_is_asked_less_and_less_often_until_it_succeeds() {
        let scene = TokenFixture::new(HOUR);
        scene.inner.failing.store(true, SeqCst);
        // Ten requests a second for a minute and a half, each of which the SDK makes ask for a token.
        for _ in 0..900 {
            scene.cached.get_token(&[SCOPE], None).await.unwrap_err();
            tokio::time::advance(Duration::from_millis(100)).await;
        }
        assert!((5..=9).contains(&scene.fetches()), "{} fetches", scene.fetches());
        scene.inner.failing.store(false, SeqCst);
        tokio::time::advance(LONGEST_PAUSE * 2).await;
        scene.token().await;
        let fetches = scene.fetches();
        scene.token().await;
        assert_eq!(scene.fetches(), fetches);
    }

    #[tokio::test(start_paused = true)]
    async fn a_fetch_that_never_ends_is_given_up_and_the_next_one_begins() {
        let scene = TokenFixture::new(HOUR);
        scene.inner.gate.forget_permits(Semaphore::MAX_PERMITS);
        let error = scene.cached.get_token(&[SCOPE], None).await.unwrap_err();
        assert!(error.to_string().contains("no answer within 30s"), "{error}");
        scene.inner.gate.add_permits(1);
        tokio::time::advance(FIRST_PAUSE * 2).await;
        scene.token().await;
        assert_eq!(scene.fetches(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_the_service_refuses_is_fetched_anew_once_a_minute_at_most() {
        let scene = TokenFixture::new(HOUR);
        let (first, tokens) = (scene.token().await, scene.cached.tokens());
        let begun = Instant::now();
        assert!(tokens.drop_refused(begun));
        let second = scene.token().await;
        assert_ne!(second, first);
        tokio::time::advance(SECOND).await;
        assert!(tokens.drop_refused(begun), "what was on its way with the first one");
        assert!(!tokens.drop_refused(Instant::now()));
        assert_eq!(scene.token().await, second);
        tokio::time::advance(DROP_INTERVAL).await;
        assert!(tokens.drop_refused(Instant::now()));
        scene.token().await;
        assert_eq!(scene.fetches(), 3);
    }

    /// A credential that gives one and the same token for as long as it incarnations, as those of `azure_identity` do.
    #[derive(Debug)]
    struct Keeping(String);

    #[async_trait]
    impl TokenCredential for Keeping {
        async fn get_token(
            &self,
            _scopes: &[&str],
            _options: Option<TokenRequestOptions<'_>>,
        ) -> azure_core::Result<AccessToken> {
            Ok(AccessToken::new(self.0.clone(), OffsetDateTime::UNIX_EPOCH + HOUR * 1_000_000))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_credential_that_keeps_tokens_itself_is_made_anew_after_one_was_refused() {
        let made = AtomicU64::new(1);
        let again = move || {
            let number = made.fetch_add(1, SeqCst) + 1;
            Some(Arc::new(Keeping(format!("token {number}"))) as Arc<dyn TokenCredential>)
        };
        let first = Arc::new(Keeping("token 1".to_owned()));
        let cached = Cached::new(first, Clock::system(), Randomness::seeded(1)).made_again_by(again);
        let token = || async { cached.get_token(&[SCOPE], None).await.unwrap().token.secret().to_owned() };
        assert_eq!(token().await, "token 1");
        assert!(cached.tokens().drop_refused(Instant::now()));
        assert_eq!(token().await, "token 2");
        assert_eq!(token().await, "token 2");
    }

    #[tokio::test]
    async fn each_set_of_scopes_has_a_token_of_its_own() {
        let scene = TokenFixture::new(HOUR);
        let other = ["https://other/.default", "https://more/.default"];
        for _ in 0..2 {
            assert_eq!(scene.token().await, format!("1 for {SCOPE}"));
            let token = scene.cached.get_token(&other, None).await.unwrap();
            assert_eq!(token.token.secret(), "2 for https://other/.default https://more/.default");
        }
        assert_eq!(scene.fetches(), 2);
    }

    #[tokio::test]
    async fn a_token_that_has_expired_already_is_given_and_not_kept() {
        let scene = TokenFixture::new(Duration::ZERO);
        assert_eq!(scene.token().await, format!("1 for {SCOPE}"));
        assert_eq!(scene.token().await, format!("2 for {SCOPE}"));
    }

    #[test]
    fn a_fetch_that_ends_with_its_runtime_is_begun_again_in_the_next() {
        let scene = TokenFixture::new(HOUR);
        scene.inner.gate.forget_permits(Semaphore::MAX_PERMITS);
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime().block_on(async {
            let cached = scene.cached.clone();
            tokio::spawn(async move { cached.get_token(&[SCOPE], None).await });
            scene.inner.begun.subscribe().wait_for(|begun| *begun == 1).await.unwrap();
        });
        scene.inner.gate.add_permits(1);
        assert_eq!(runtime().block_on(scene.token()), format!("1 for {SCOPE}"));
        assert_eq!(scene.fetches(), 2);
    }

    #[tokio::test]
    async fn debug_shows_no_token() {
        let scene = TokenFixture::new(HOUR);
        let token = scene.token().await;
        assert!(!format!("{:?}", scene.cached).contains(&token));
    }
}
