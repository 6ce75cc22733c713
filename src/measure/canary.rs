//! stub
use super::probe::ProbeError;
pub trait Canary {
    fn run(&mut self) -> f64;
}
pub struct CpuCanary;
impl CpuCanary {
    pub fn new(_t: Option<usize>) -> Result<Self, ProbeError> {
        Ok(Self)
    }
}
impl Canary for CpuCanary {
    fn run(&mut self) -> f64 {
        1.0
    }
}
pub struct Calibrated<C>(C);
impl<C: Canary> Calibrated<C> {
    pub fn new(c: C) -> Self {
        Self(c)
    }
    pub fn ratio(&mut self) -> f64 {
        self.0.run()
    }
    pub fn noise(&self) -> f64 {
        0.0
    }
}
impl Canary for Box<dyn Canary> {
    fn run(&mut self) -> f64 {
        self.as_mut().run()
    }
}
